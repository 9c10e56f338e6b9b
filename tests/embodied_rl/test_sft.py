"""Supervised fine-tuning of a tiny OpenVLA: it learns, resumes exactly, and reinforcement starts from its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

pytest.importorskip("timm", reason="the extra vla is not installed")

from picture_env import ENV, write_demonstrations
from test_openvla_training import SPEC, FakeContext

from embodied_rl.config import Config
from embodied_rl.data import DemonstrationRows
from embodied_rl.sft import FineTuningTeam, batches, split
from embodied_rl.workers.imitator import Imitator
from policies import openvla
from scheduler.cluster import Cluster
from scheduler.trace import Trace

LAYER = {
    "env": ENV,
    "policy": {"kind": "openvla"},
    "rollout": {"steps": 8},
    "sft": {"batch": 22, "steps": 4, "held_out": 0.25},
    "algorithm": {"lr": 1e-3, "max_grad_norm": 1.0, "epochs": 1, "minibatches": 1},
    "train": {"iterations": 2, "checkpoint_every": 1},
    "evaluation": {"every": 0, "final_episodes": 4, "videos": 0},
    "tracking": {"wandb": "disabled", "tensorboard": False},
    "cluster": {"cpu_slots": 2, "timeout_s": 120},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "demos"
    write_demonstrations(path, Config(**LAYER))
    return path


def make_imitator(data: Path, policy: dict[str, Any] | None = None, **sft: float) -> Imitator:
    imitator = Imitator.__new__(Imitator)
    imitator.context, imitator.trace = FakeContext(), Trace("actor[0]")  # type: ignore[assignment]
    layer = {**LAYER, "policy": policy or LAYER["policy"], "sft": {**LAYER["sft"], "data": str(data), **sft}}
    imitator.__init__(Config(**layer))  # type: ignore[misc]
    imitator.build(SPEC)
    return imitator


def iterate(imitator: Imitator, iterations: int) -> list[dict[str, float]]:
    """What the driver lets an actor do."""
    sft, seed = imitator.config.sft, imitator.config.seed
    rows, held_out = split([info.length for info in imitator.demonstrations.episodes], sft.held_out, seed)
    found = []
    for iteration in range(iterations):
        imitator.iteration = iteration
        share = DemonstrationRows(batches(rows, iteration, sft.steps, sft.batch, seed), held_out)
        found.append(imitator.imitate([share]).report)
    return found


def test_it_learns_to_do_what_was_demonstrated(data: Path) -> None:
    first, *_, last = iterate(make_imitator(data, steps=4), 40)
    assert first["held_out/token_accuracy"] < 0.7 and last["held_out/token_accuracy"] > 0.9
    assert last["held_out/action_l1"] < 0.1 < first["held_out/action_l1"]
    assert last["losses/imitation"] < 0.1 * first["losses/imitation"]


def test_the_statistics_of_the_data_become_the_policy_s(data: Path) -> None:
    imitator = make_imitator(data)
    assert imitator.policy.statistics.low.tolist() == pytest.approx([-0.7, -0.7])
    action = torch.tensor([[[-0.7, 0.7]]])
    assert imitator.policy.tokenise(action).flatten().tolist() == [
        imitator.policy.tokens.ids.stop - 1,
        imitator.policy.tokens.ids.start,
    ]


def test_a_chunk_ends_with_its_episode(data: Path) -> None:
    """Of 4 steps, chunks of 3 hold 3, 3, 2 and 1 actions: what would follow enters neither loss nor measures."""
    chunks = {"kind": "openvla_oft", "chunk": 3}
    imitator, other = (make_imitator(data, chunks, batch=4, steps=1) for _ in range(2))
    share = DemonstrationRows(np.arange(4)[None], np.arange(4))
    observation, action, valid = imitator._demonstrated(np.arange(4))
    assert valid.sum(-1).tolist() == [3, 3, 2, 1]
    with torch.no_grad():
        logprob, _, _ = imitator.policy.evaluate(observation, imitator.policy.tokenise(action))
    other._kept = {
        row: (
            {key: value[row] for key, value in observation.items()},
            torch.where(valid[..., None], action, 0.7)[row],
            own,
        )
        for row, own in enumerate(valid)
    }
    assert not torch.equal(other._demonstrated(np.arange(4))[1], action)
    for worker in (imitator, other):
        worker.iteration = 0
    first, same = (worker.imitate([share]).report for worker in (imitator, other))
    assert first["losses/imitation"] == pytest.approx(float(-logprob[valid].mean()), rel=1e-5)
    assert first == same


@pytest.mark.parametrize("policy", [None, {"kind": "openvla_oft", "chunk": 3}])
def test_micro_batches_change_nothing(data: Path, policy: dict[str, Any] | None) -> None:
    results = []
    for size in (None, 5):
        imitator = make_imitator(data, policy)
        imitator.config = imitator.config.model_copy(
            update={"algorithm": imitator.config.algorithm.model_copy(update={"micro_batch": size})}
        )
        (metrics,) = iterate(imitator, 1)
        results.append(metrics)
    assert results[1] == pytest.approx(results[0], rel=1e-4)


def test_features_of_frozen_towers_are_learned_from_like_pictures(data: Path) -> None:
    results = []
    for reused in (False, True):
        openvla = {"frozen": ("vision_backbone",), "reuse_features": reused}
        imitator = make_imitator(data, {"kind": "openvla", "openvla": openvla})
        (metrics,) = iterate(imitator, 1)
        results.append(metrics)
    assert results[1] == pytest.approx(results[0], rel=1e-4) and "features" in imitator._kept.popitem()[1][0]


def test_passes_follow_each_other_and_miss_no_row() -> None:
    rows = np.arange(100, 110)
    drawn = np.concatenate([batches(rows, iteration, 2, 5, seed=0).ravel() for iteration in range(3)])
    passes = drawn.reshape(3, 10)
    assert all(sorted(one) == rows.tolist() for one in passes.tolist())
    assert not np.array_equal(passes[0], passes[1])
    assert not np.array_equal(passes[0], batches(rows, 0, 2, 5, seed=1).ravel())


def test_whole_episodes_are_held_out() -> None:
    train, held_out = split([3, 2, 4], 0.3, seed=0)
    assert sorted([*train, *held_out]) == list(range(9))
    assert set(held_out) in ({0, 1, 2}, {3, 4}, {5, 6, 7, 8})
    for share in (0.01, 0.99):
        assert all(map(len, split([3, 2], share, seed=0)))


def test_two_actor_ranks_learn_what_one_does_and_rollout_workers_get_it(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    alone = make_imitator(data)
    expected = iterate(alone, 2)
    sft = alone.config.sft
    rows, held_out = split([info.length for info in alone.demonstrations.episodes], sft.held_out, 0)
    with Cluster(cpu_slots=2, timeout_s=120) as cluster:
        team = FineTuningTeam(alone.config.model_copy(update={"placement": "actor: 0-1/1; rollout, env: all"}), cluster)
        for iteration in range(2):
            share = DemonstrationRows(batches(rows, iteration, sft.steps, sft.batch, 0), held_out)
            assert team.imitate(iteration, share) == pytest.approx(expected[iteration], rel=1e-3)
        learned, received = (group.state().result()[0]["policy"] for group in (team.actor, team.rollout))
        team.close()
    for name, value in alone.policy.learned_state().items():
        torch.testing.assert_close(learned[name], value, rtol=1e-3, atol=1e-4)
        assert torch.equal(learned[name], received[name])


# ---------------------------------------------------------------------------------------------- the command


def run(*words: str, code: int = 0) -> str:
    """The console script, with the toy env importable."""
    console_script = str(Path(sys.executable).with_name("embodied-rl"))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [console_script, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def test_a_resumed_run_equals_an_unbroken_one_and_reinforcement_starts_from_it(data: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "picture.yaml"
    recipe.write_text(yaml.safe_dump({**LAYER, "run_root": str(tmp_path)}))
    run("sft", str(recipe), "--data", str(data))
    said = run("sft", str(recipe), "--data", str(data), "--resume", "train.iterations=4")
    assert "resumed after iteration 2" in said and "success " in said
    folder = tmp_path / "picture"
    assert "<html" in (folder / "report.html").read_text()
    unbroken = make_imitator(data)
    expected = iterate(unbroken, 4)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [{key: line[key] for key in expected[0]} for line in lines] == expected
    stored = load_file(folder / "checkpoints" / "step_000004" / "policy.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in unbroken.policy.learned_state().items())

    pretrained = openvla.load(folder / "pretrained")
    assert pretrained.statistics.low.tolist() == pytest.approx([-0.7, -0.7])
    weights = unbroken.policy.network.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in pretrained.network.state_dict().items())
    checkpoint = f"policy.openvla.checkpoint={folder / 'pretrained'}"
    run("train", str(recipe), checkpoint, "name=rl", "train.iterations=1")
    assert json.loads((tmp_path / "rl" / "metrics.jsonl").read_text())["losses/approx_kl"] < 1e-6
