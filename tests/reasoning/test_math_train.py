"""The whole training run with a small model: it learns, and it resumes exactly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.checkpoint import load_checkpoint
from reasoning import cli
from reasoning.benchmark import run_benchmark
from reasoning.recipe import load_recipe
from reasoning.train import train

# Of the asynchronous kind, with a reference model. 20 problems and 8 in an iteration: a pass ends inside the third.
SMALL = {
    "sampling.prompts": 8, "sampling.group_size": 4, "sampling.ahead": 1, "data.train_size": 20, "data.test_size": 8,
    "train.warm_start": 0, "train.checkpoint_every": 1, "evaluation.every": 0, "tracking.wandb": "disabled",
    "tracking.tensorboard": "false", "cluster.cpu_slots": 1, "algorithm.minibatches": 2, "algorithm.kl_coef": 0.05,
}  # fmt: skip
ITERATIONS = 4


def overrides(values: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def run(directory: Path, iterations: int, resume: bool = False, **more: Any) -> Path:
    config, faults = load_recipe("tiny_addition", overrides({**SMALL, "train.iterations": iterations, **more}))
    assert not faults
    assert train(config, directory, resume, "embodied-rl train tiny_addition") == 0
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
    return run(tmp_path_factory.mktemp("runs") / "unbroken", ITERATIONS)


def killed_after(directory: Path, step: int, *options: str) -> None:
    """A run in a process of its own that is killed once it has gone beyond an iteration."""
    values = overrides({**SMALL, "train.iterations": ITERATIONS, "run_root": directory.parent, "name": directory.name})
    script = Path(sys.executable).with_name("embodied-rl")
    command = [script, "train", "tiny_addition", *values, *options]
    said, metrics, deadline = directory.with_suffix(".txt"), directory / "metrics.jsonl", time.monotonic() + 240
    with said.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    has_ended = False
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step + 1:  # the first line is of iteration 0
        assert not has_ended and time.monotonic() < deadline, said.read_text()
        time.sleep(0.05)
        has_ended = process.poll() is not None
    with suppress(ProcessLookupError):  # it has just ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_killed_run_resumes_exactly_and_so_does_one_killed_again(unbroken: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    killed_after(broken, 2)
    killed_after(broken, 3, "--resume")  # goes over the end of a pass
    run(broken, ITERATIONS, resume=True)
    assert reproducible(broken) == reproducible(unbroken)
    ours, theirs = parameters(broken, ITERATIONS), parameters(unbroken, ITERATIONS)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_leaves_what_its_readers_expect(unbroken: Path) -> None:
    content = json.loads((unbroken / "evaluation.json").read_text())
    assert content["n"] == 8 and len(content["episodes"]) == 8
    assert "report.html" in os.listdir(unbroken) and (unbroken / "pretrained" / "config.json").is_file()
    shown = [json.loads(line) for line in (unbroken / "completions.jsonl").read_text().splitlines()]
    assert {"prompt", "completion", "answer", "reference", "verdict"} <= set(shown[0])
    last = reproducible(unbroken)[-1]
    assert reproducible(unbroken)[1]["sampling/staleness"] == 0.0 and last["sampling/staleness"] == 1.0
    assert last["losses/kl"] > 0.0 and last["data/epoch"] == pytest.approx(ITERATIONS * 8 / 20)
    assert (unbroken / "lock").exists()


def test_evaluation_of_a_run_with_several_completions(
    unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.evaluate([str(unbroken), "evaluation.problems=8"], "digits:1", 4, 1.0, tmp_path) == 0
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["problems"] == 8 and {"pass@1", "avg@4", "maj@4", "pass@2", "pass@4"} <= set(content)
    problems = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    assert len(problems) == 8 and all(len(problem["answers"]) == 4 for problem in problems)
    shown = capsys.readouterr().out
    assert "reference" in shown and "verdict" in shown


def test_accuracy_is_printed_even_where_it_cannot_be_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "problems.jsonl").mkdir()
    config, _ = load_recipe("tiny_addition", ["data.test_size=4", "cluster.cpu_slots=1"])
    assert run_benchmark(config, 1, 0.0, tmp_path) == 1
    shown = capsys.readouterr()
    assert "pass@1 " in shown.out and "4 problems; " in shown.out and "problems.jsonl" in shown.err


def test_it_learns_to_add_from_the_reward_alone(tmp_path: Path) -> None:
    """After a short warm start, which gives the form of an answer and few right ones, GRPO does the rest."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    learning = {
        "data.train": tmp_path / "sums.jsonl", "data.test": tmp_path / "sums.jsonl", "data.test_size": 100,
        "sampling.prompts": 50, "sampling.group_size": 8, "sampling.ahead": 0, "train.warm_start": 25,
        "train.checkpoint_every": 100, "algorithm.lr": 3e-4, "algorithm.minibatches": 1, "algorithm.kl_coef": 0,
        "algorithm.elastic": "true",
    }  # fmt: skip
    found = run(tmp_path / "run", 30, **learning)
    before = reproducible(found)[0]["eval/pass@1"]
    after = json.loads((found / "evaluation.json").read_text())["success_once"]
    assert before < 0.5 and after > before + 0.15
