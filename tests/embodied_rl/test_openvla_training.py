"""Reinforcement learning with a tiny OpenVLA: what is recorded, learned and sent, and that it starts from ratio 1."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("timm", reason="the extra vla is not installed")

from picture_env import ENV, HORIZON, SIZE

from embodied_rl.build import build_policy, require_fit
from embodied_rl.config import Config
from embodied_rl.data import Trajectories
from embodied_rl.team import Team
from embodied_rl.workers.actor import ActorWorker
from envs.base import ActionSpec, EnvError, EnvSpec
from policies import SlotNoise
from scheduler.cluster import Cluster
from scheduler.trace import Trace

SPEC = EnvSpec(ActionSpec((-1.0,) * 2, (1.0,) * 2), None, (1, SIZE, SIZE, 3), HORIZON, "touch the square", True)
GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "openvla" / "tiny"


class FakeContext:
    rank, world_size, device_kind, group, name = 0, 1, "cpu", "actor", "actor[0]"


def settings(openvla: dict[str, Any] | None = None, **changes: Any) -> Config:
    algorithm = {"epochs": 1, "minibatches": 1, "micro_batch": 8, **changes.pop("algorithm", {})}
    return Config(
        env=ENV,
        policy={"kind": "openvla", "openvla": openvla or {}},
        rollout={"steps": 8, "pipeline_stages": 2},
        algorithm=algorithm,
        cluster={"cpu_slots": 2, "timeout_s": 120},
        **changes,
    )


def make_actor(config: Config) -> ActorWorker:
    actor = ActorWorker.__new__(ActorWorker)
    actor.context, actor.trace = FakeContext(), Trace("actor[0]")  # type: ignore[assignment]
    actor.__init__(config)  # type: ignore[misc]
    actor.build(SPEC)
    return actor


def trajectories(policy: Any, steps: int = 3, envs: int = 2) -> Trajectories:
    """What a rollout worker records, for random pictures."""
    image = torch.randint(256, (steps * envs, 1, SIZE, SIZE, 3), dtype=torch.uint8)
    prepared = policy.prepare({"image": image, "instruction": ["push"] * (steps * envs)})
    output = policy.act(prepared, deterministic=False, generator=SlotNoise(0, range(steps * envs)))
    shaped = lambda x: x.view(steps, envs, *x.shape[1:])  # noqa: E731
    never = torch.zeros(steps, envs, 1, dtype=torch.bool)
    return Trajectories(
        {key: shaped(value) for key, value in prepared.items()}, shaped(output.token), shaped(output.logprob),
        shaped(output.value), torch.zeros(steps, envs), torch.randn(steps, envs, 1), never, never, ~never,
        never[..., 0], never[..., 0], torch.arange(envs),
    )  # fmt: skip


def test_an_iteration_of_ppo_acts_learns_and_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with Cluster(cpu_slots=2, timeout_s=120) as cluster:
        team = Team(settings({"lora_rank": 4}), cluster)
        team.sync_weights()
        before = team.actor.weights([]).result()[0][0]
        done = team.iterate(0, 2)
        after = team.actor.weights([]).result()[0][0]
        episodes = team.evaluate(4, 0, deterministic=True)
        team.close()
    assert len(episodes) == 4 and done.rollout.env_steps == 32
    assert all(math.isfinite(value) for value in done.learned.values())
    assert done.learned["losses/approx_kl"] < 1e-9 and done.learned["losses/clip_fraction"] == 0, "one step: ratio 1"
    assert done.learned["losses/grad_norm"] > 0
    assert all(".lora_" in name or name.startswith(("critic.", "_extra_state")) for name in after), "no frozen weights"
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert any(".lora_B." in name for name in changed) and any(name.startswith("critic.") for name in changed)


def test_frozen_weights_stay_and_are_not_optimised() -> None:
    actor = make_actor(settings({"frozen": ("vision_backbone", "language_model")}))
    before = {name: value.clone() for name, value in actor.policy.state_dict().items()}
    actor.update([trajectories(actor.policy)])
    changed = {name for name, value in actor.policy.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.startswith(("network.projector.", "critic.")) for name in changed)
    assert set(actor.policy.learned_state()) >= changed
    assert not any("language_model" in name for name in actor.policy.learned_state())


def test_rollout_and_actor_that_differ_are_told_before_the_first_update() -> None:
    other = build_policy(settings(seed=1), SPEC)
    for parameter in other.parameters():
        parameter.data *= 2
    actor = make_actor(settings())
    with pytest.raises(RuntimeError, match="before the first update.*do not have the same policy"):
        actor.update([trajectories(other)])


def test_statistics_travel_with_the_parameters() -> None:
    source, target = (build_policy(settings(seed=seed), SPEC) for seed in (0, 1))
    source.adopt_statistics({"reach": {"action": {"q01": [-2.0, 0.0], "q99": [2.0, 1.0]}}}, "reach")
    target.load_learned_state(source.learned_state())
    assert target.statistics.low.tolist() == [-2.0, 0.0] and target.settings.unnorm_key == "reach"
    with pytest.raises(RuntimeError, match="not the parameters of this policy:\n  missing: network"):
        target.load_learned_state({"_extra_state": torch.zeros(2)})


@pytest.mark.parametrize(
    ("spec", "openvla", "message"),
    [
        ({}, {"checkpoint": str(GOLDEN), "unnorm_key": "bridge_golden"}, "have 7 dimensions, those of .* 2; choose"),
        ({"image_shape": None}, {}, "has 0 cameras"),
        ({}, {"view": 1}, "policy.openvla.view has camera 1, and picture_env:Picture-v0 has 1 cameras"),
        ({"action": ActionSpec((0.0,), (1.0,), 2)}, {}, "continuous, and .* has 2 choices"),
    ],
)
def test_an_env_that_does_not_fit_is_told_once_it_is_known(spec: dict, openvla: dict, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        require_fit(settings(openvla), EnvSpec(**{**vars(SPEC), **spec}))
