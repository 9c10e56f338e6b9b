"""Whole runs through the console script: exact resume, placements, pipeline stages, and killed processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

SMALL = [
    "env.num_envs=4", "rollout.steps=16", "policy.hidden=[16]", "algorithm.epochs=2", "algorithm.minibatches=2",
    "train.iterations=6", "train.checkpoint_every=2", "evaluation.every=3", "evaluation.episodes=4",
    "evaluation.final_episodes=4", "evaluation.videos=0", "tracking.wandb=disabled", "tracking.tensorboard=false",
    "cluster.cpu_slots=2", "cluster.timeout_s=60",
]  # fmt: skip


def without(settings: list[str], words: tuple[str, ...]) -> list[str]:
    """The settings that the words do not give again."""
    given = {word.split("=")[0] for word in words}
    return [setting for setting in settings if setting.split("=")[0] not in given]


def start(root: Path, *words: str) -> subprocess.Popen:
    """Start a small CartPole run in the background."""
    console_script = str(Path(sys.executable).with_name("embodied-rl"))
    command = [console_script, "train", "cartpole_ppo", f"run_root={root}", *without(SMALL, words), *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=listen_to_interrupts
    )


def listen_to_interrupts() -> None:
    """Tests may themselves run in the background, where shells let Ctrl-C be ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(process: subprocess.Popen, timeout: float = 120) -> str:
    output, _ = process.communicate(timeout=timeout)
    return output


def complete(root: Path, *words: str) -> Path:
    """Run to the end and return the run directory."""
    process = start(root, *words)
    output = finish(process)
    assert process.returncode == 0, output
    return root / "cartpole_ppo"


def lines(run: Path) -> list[dict[str, Any]]:
    """The reproducible part of the metrics."""
    timings = ("perf/", "time/", "schedule/")
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(timings)} for line in parsed]


def parameters(run: Path, step: int = 6) -> bytes:
    return (run / "checkpoints" / f"step_{step:06d}" / "policy.safetensors").read_bytes()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.02)


def wait_for_lines(run: Path, count: int, process: subprocess.Popen) -> None:
    """Wait until the run has logged `count` iterations."""
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= count, process)


def pid_of(run: Path, worker: str) -> int:
    return json.loads((run / "processes.json").read_text())[worker]


def children_of(process: subprocess.Popen) -> str:
    """The names of its processes; they come and go meanwhile."""
    names = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            names.append(child.name())
    return " ".join(names)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete(tmp_path_factory.mktemp("unbroken"))


def test_a_run_leaves_record_report_and_checkpoints(unbroken: Path) -> None:
    assert [line["step"] for line in lines(unbroken)] == [1, 2, 3, 4, 5, 6]
    assert {"losses/policy", "losses/explained_variance", "rollout/return"} <= set(lines(unbroken)[-1])
    assert "eval/return" in lines(unbroken)[2]
    assert len(json.loads((unbroken / "evaluation.json").read_text())["episodes"]) == 4
    assert "<html" in (unbroken / "report.html").read_text()
    names = {event["args"]["name"] for event in trace_events(unbroken) if event["name"] == "thread_name"}
    assert {"env[0].p0", "rollout[0]", "actor[0]"} <= names


def trace_events(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "trace.json").read_text())["traceEvents"]


def test_a_run_killed_twice_resumes_to_the_same_metrics_and_parameters(unbroken: Path, tmp_path: Path) -> None:
    run = tmp_path / "cartpole_ppo"
    for seen, words in ((3, []), (5, ["--resume"])):
        process = start(tmp_path, *words)
        wait_for_lines(run, seen, process)
        process.kill()
        finish(process)
    resumed = complete(tmp_path, "--resume")
    assert lines(resumed) == lines(unbroken)
    assert parameters(resumed) == parameters(unbroken)


def test_a_run_killed_before_its_first_checkpoint_starts_again(unbroken: Path, tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for_lines(tmp_path / "cartpole_ppo", 1, process)
    process.kill()
    finish(process)
    for checkpoint in (tmp_path / "cartpole_ppo" / "checkpoints").glob("*"):
        checkpoint.rename(tmp_path / checkpoint.name)
    assert lines(complete(tmp_path, "--resume")) == lines(unbroken)


def test_resuming_a_finished_run_evaluates_it_again_and_changes_nothing(unbroken: Path) -> None:
    before = lines(unbroken), parameters(unbroken), (unbroken / "evaluation.json").read_text()
    complete(unbroken.parent, "--resume")
    assert (lines(unbroken), parameters(unbroken), (unbroken / "evaluation.json").read_text()) == before


def test_the_final_evaluation_is_of_the_best_check_during_training(tmp_path: Path) -> None:
    words = ["evaluation.every=1", "train.iterations=8", "algorithm.lr=0.05", "train.keep_checkpoints=1"]
    run = complete(tmp_path, *words)
    scores = {line["step"]: line["eval/return"] for line in lines(run)}
    best = max(scores, key=lambda step: (scores[step], step))
    evaluated = json.loads((run / "evaluation.json").read_text())["fingerprint"]["checkpoint"]
    assert evaluated == f"step_{best:06d}"
    assert {path.name for path in (run / "checkpoints").glob("step_*")} <= {evaluated, "step_000008"}


def test_evaluating_a_run_again_gives_the_episodes_of_its_final_evaluation(unbroken: Path) -> None:
    console_script = str(Path(sys.executable).with_name("embodied-rl"))
    done = subprocess.run([console_script, "eval", str(unbroken)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    final = json.loads((unbroken / "evaluation.json").read_text())
    again = json.loads((unbroken / "evaluations" / final["fingerprint"]["checkpoint"] / "evaluation.json").read_text())
    assert again["episodes"] == final["episodes"] and len(again["episodes"]) == 4
    assert f"return {final['return']:.1f} over 4 episodes" in done.stdout


def test_disaggregated_placement_learns_the_same_parameters(unbroken: Path, tmp_path: Path) -> None:
    run = complete(tmp_path, "placement=env: 0; rollout, actor: 1")
    assert lines(run) == lines(unbroken)
    assert parameters(run) == parameters(unbroken)


def test_deterministic_runs_do_not_depend_on_pipeline_stages(tmp_path: Path) -> None:
    runs = []
    for stages in (1, 4):
        words = ["deterministic=true", f"rollout.pipeline_stages={stages}", "env.processes=1"]
        runs.append(complete(tmp_path / str(stages), *words))
    assert lines(runs[0]) == lines(runs[1])
    assert parameters(runs[0]) == parameters(runs[1])


def test_two_actor_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    words = ["algorithm.minibatches=1", "evaluation.every=0", "train.iterations=2"]
    one = complete(tmp_path / "one", *words)
    two = complete(tmp_path / "two", *words, "placement=env, rollout: all; actor: all/1")
    expected, found = (load_file(run / "checkpoints" / "step_000002" / "policy.safetensors") for run in (one, two))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-5)
    for key in ("losses/samples", "losses/policy", "losses/value", "losses/explained_variance", "losses/grad_norm"):
        assert lines(two)[-1][key] == pytest.approx(lines(one)[-1][key], rel=1e-3, abs=1e-5)


def test_two_ranks_of_every_group_complete_a_run(tmp_path: Path) -> None:
    run = complete(tmp_path, "placement=env, rollout, actor: all/1", "rollout.pipeline_stages=1")
    assert lines(run)[-1]["env_steps"] == 6 * 4 * 16


def test_a_run_directory_in_use_is_refused(tmp_path: Path) -> None:
    first = start(tmp_path, "train.iterations=5000", "train.keep_checkpoints=5000")  # those that the second one reads
    wait_for_lines(tmp_path / "cartpole_ppo", 1, first)
    second = start(tmp_path, "--resume")
    assert "is in use by another run" in finish(second)
    assert second.returncode == 2
    first.send_signal(signal.SIGINT)
    finish(first)


def test_settings_that_need_a_success_test_are_refused_for_an_env_without_one(tmp_path: Path) -> None:
    process = start(tmp_path, "train.stop_at_success=0.9")
    assert "CartPole-v1 has no success test, which train.stop_at_success need" in finish(process)
    assert process.returncode == 1


def test_a_killed_env_process_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    words = ["evaluation.every=0", "placement=actor, rollout, env: all"]  # only envs that train, which no plan moves
    process = start(tmp_path, "train.iterations=5000", *words)
    run = tmp_path / "cartpole_ppo"
    wait_for_lines(run, 2, process)
    os.kill(pid_of(run, "env[0].p1"), signal.SIGKILL)
    metrics = run / "metrics.jsonl"
    wait_until(lambda: re.search(r'"env/replaced_processes": 1\b', metrics.read_text()) is not None, process)
    wait_for_lines(run, len(metrics.read_text().splitlines()) + 2, process)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert "replaced 1 env process so far; 2 lost episodes were restarted" in output
    assert lines(run)[-1]["env/replaced_processes"] == 1
    assert "was killed by SIGKILL" in (run / "log.txt").read_text()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_says_how_to_go_on_and_leaves_no_process(sent: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path, "train.iterations=5000")
    run = tmp_path / "cartpole_ppo"
    wait_for_lines(run, 2, process)
    children = [pid for name, pid in json.loads((run / "processes.json").read_text()).items() if name != "driver"]
    process.send_signal(sent)
    output = finish(process)
    assert process.returncode == 130, output
    assert f"Resume with: embodied-rl train {run} --resume\n" in output and "Traceback" not in output
    deadline = time.monotonic() + 60
    while alive := [pid for pid in children if Path(f"/proc/{pid}/cmdline").exists() and command_of(pid)]:
        assert time.monotonic() < deadline, f"left behind: {alive}"
        time.sleep(0.1)


def test_a_run_that_is_terminated_while_ray_starts_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(tmp_path, "train.iterations=5000")
    wait_until(lambda: "gcs_server" in children_of(process), process)
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 130 and "Resume with: " in output and "Traceback" not in output, output


def test_a_terminated_evaluation_ends_as_by_ctrl_c_and_leaves_no_folder(unbroken: Path) -> None:
    console_script = str(Path(sys.executable).with_name("embodied-rl"))
    command = [console_script, "eval", str(unbroken), "--episodes", "100000", "--out", str(unbroken.parent / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: "EnvWorker" in children_of(process), process)
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 130 and output.splitlines()[-1] == "interrupted", output
    assert not (unbroken.parent / "out").exists()


def command_of(pid: int) -> bytes:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("worker", ["rollout[0]", "actor[0]", "env[0]"])
def test_a_killed_worker_ends_the_run_with_its_name_and_a_resume_command(worker: str, tmp_path: Path) -> None:
    process = start(tmp_path, "train.iterations=5000", "placement=actor, rollout, env: all")  # no plan moves a worker
    run = tmp_path / "cartpole_ppo"
    wait_for_lines(run, 2, process)
    os.kill(pid_of(run, worker), signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1
    assert f"The run ended because {worker} died" in output
    reached = lines(run)[-1]["step"]
    assert f"Resume with: embodied-rl train {run} --resume\n" in output
    command = [str(Path(sys.executable).with_name("embodied-rl")), "train", str(run), "--resume"]
    command.append(f"train.iterations={reached + 2}")
    output = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert lines(run)[-1]["step"] == reached + 2, output


def test_grpo_trains_on_groups_that_share_their_initial_states(tmp_path: Path) -> None:
    words = [
        "algorithm.name=grpo", "algorithm.group_size=2", "env.horizon=16", "algorithm.aggregation=sequence-mean",
    ]  # fmt: skip
    run = complete(tmp_path, *words)
    assert 0 <= lines(run)[0]["grpo/zero_std_fraction"] <= 1
    assert "losses/value" not in lines(run)[0]
    assert all(line["rollout/episodes"] == 4 for line in lines(run))
