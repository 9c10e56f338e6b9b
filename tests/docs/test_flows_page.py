"""The program on the page about flows runs, and does what the page says of it."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "flows.md"


def test_the_program_runs_and_is_short(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(program.splitlines()) < 100
    (tmp_path / "flow.py").write_text(program)
    done = subprocess.run([sys.executable, "flow.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "'mean'" in line]
    means = [float(re.search(r"'mean': ([\d.]+)", line)[1]) for line in lines]  # type: ignore[index]
    assert len(means) == 12
    import random

    good = [x for x in (random.Random(seed).gauss(1.0, 1.0) for seed in range(32)) if x > 0]
    assert abs(means[-1] - sum(good) / len(good)) < 1e-3  # the state went along with every move
