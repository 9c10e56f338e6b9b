"""The simulator on the page about env servers is served, and a policy learns it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy

PAGE = Path(__file__).parents[2] / "docs" / "env_servers.md"


def test_the_simulator_is_short_and_a_policy_learns_it_from_a_server(tmp_path: Path) -> None:
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert len(program.splitlines()) <= 60
    (tmp_path / "reach.py").write_text(program)
    options = ["train.iterations=6", "evaluation.every=0", "evaluation.final_episodes=20", "name=reach"]
    options += ["tracking.wandb=disabled", "tracking.tensorboard=false", "cluster.cpu_slots=1"]
    done = subprocess.run(
        [sys.executable, "reach.py", *options], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs" / "reach" / "metrics.jsonl").read_text().splitlines()
    returns = [json.loads(line)["rollout/return"] for line in lines]
    assert len(returns) == 6 and returns[-1] > returns[0] + 1
    record = json.loads((tmp_path / "runs" / "reach" / "evaluation.json").read_text())
    assert record["fingerprint"]["env"]["server"] and record["n"] == 20 and record["successes"] > 0
    [versions] = record["fingerprint"]["servers"].values()
    assert versions["numpy"] == numpy.__version__ and f"numpy {numpy.__version__}" in done.stdout
