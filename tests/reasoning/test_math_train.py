"""The whole training run with a small model: it learns, and it resumes exactly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from embodied_rl.checkpoint import load_checkpoint
from reasoning.cli import app
from reasoning.recipe import load_recipe
from reasoning.train import train

# 40 problems and 16 in an iteration: a pass ends inside the third.
SMALL = {
    "sampling.prompts": 16, "sampling.group_size": 4, "data.train_size": 40, "data.test_size": 8,
    "train.warm_start": 8, "train.checkpoint_every": 2, "evaluation.every": 0, "tracking.wandb": "disabled",
    "tracking.tensorboard": "false", "cluster.cpu_slots": 1, "algorithm.minibatches": 2,
}  # fmt: skip


def overrides(values: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def run(directory: Path, iterations: int, resume: bool = False, **more: Any) -> Path:
    config, faults = load_recipe("tiny_addition", overrides({**SMALL, "train.iterations": iterations, **more}))
    assert not faults
    assert train(config, directory, resume, "embodied-rl math train tiny_addition") == 0
    return directory


def reproducible(directory: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    timings = ("time/", "perf/", "verifier/")
    return [{key: value for key, value in row.items() if not key.startswith(timings)} for row in rows]


def parameters(directory: Path, step: int) -> dict[str, torch.Tensor]:
    return load_checkpoint(directory / "checkpoints" / f"step_{step:06d}").parts["policy"]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("EMBODIED_RL_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    monkeypatch.undo()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "unbroken", 6)


def killed_after(directory: Path, step: int) -> None:
    """A run that is killed once it has gone on beyond the checkpoint of a step."""
    values = overrides({**SMALL, "train.iterations": 6, "run_root": directory.parent, "name": directory.name})
    command = [sys.executable, "-m", "reasoning.cli", "train", "tiny_addition", *values]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    metrics, deadline = directory / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step + 2:  # the first line is of iteration 0
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_killed_run_resumes_exactly_and_so_does_a_second_resume(unbroken: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    killed_after(broken, 2)
    run(broken, 4, resume=True)  # goes over the end of a pass
    run(broken, 6, resume=True)
    assert reproducible(broken) == reproducible(unbroken)
    ours, theirs = parameters(broken, 6), parameters(unbroken, 6)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_leaves_what_its_readers_expect(unbroken: Path) -> None:
    content = json.loads((unbroken / "evaluation.json").read_text())
    assert content["n"] == 8 and len(content["episodes"]) == 8
    assert "report.html" in os.listdir(unbroken) and (unbroken / "pretrained" / "config.json").is_file()
    shown = [json.loads(line) for line in (unbroken / "completions.jsonl").read_text().splitlines()]
    assert {"prompt", "completion", "answer", "reference", "verdict"} <= set(shown[0])
    last = reproducible(unbroken)[-1]
    assert last["sampling/logprob_gap_mean"] < 0.05 and last["sampling/staleness"] == 0.0
    assert last["data/epoch"] == pytest.approx(96 / 40)


def test_evaluation_of_a_run_with_several_completions(unbroken: Path, tmp_path: Path) -> None:
    words = [str(unbroken), "data.test_size=8", "--benchmark", "digits:1", "--samples", "4", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["eval", *words])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["problems"] == 8 and {"pass@1", "avg@4", "maj@4", "pass@2", "pass@4"} <= set(content)
    problems = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    assert len(problems) == 8 and all(len(problem["answers"]) == 4 for problem in problems)


def test_it_learns_to_add_from_the_reward_alone(tmp_path: Path) -> None:
    """After a short warm start, which gives the form of an answer and few right ones, GRPO does the rest."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    learning = {
        "data.train": tmp_path / "sums.jsonl", "data.test": tmp_path / "sums.jsonl", "data.test_size": 100,
        "sampling.prompts": 50, "sampling.group_size": 8, "train.warm_start": 25, "train.checkpoint_every": 100,
        "algorithm.lr": 3e-4, "algorithm.minibatches": 1,
    }  # fmt: skip
    found = run(tmp_path / "run", 50, **learning)
    before = reproducible(found)[0]["eval/pass@1"]
    after = json.loads((found / "evaluation.json").read_text())["success_once"]
    assert before < 0.5 and after > before + 0.15


def test_the_divergence_from_the_reference_is_reported(tmp_path: Path) -> None:
    options: dict[str, Any] = {"algorithm.kl_coef": 0.05, "train.warm_start": 0, "algorithm.name": "grpo"}
    found = run(tmp_path / "kl", 2, **options)
    assert reproducible(found)[-1]["losses/kl"] >= 0.0
