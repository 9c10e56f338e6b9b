"""Reinforcement learning with a tiny OpenVLA: what is recorded, learned and sent, and that it starts from ratio 1."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("timm", reason="the extra vla is not installed")

import yaml
from picture_env import ENV, HORIZON, SIZE
from test_train import finish, lines, listen_to_interrupts, parameters, wait_for_lines

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
    prepared = policy.encode(policy.prepare({"image": image, "instruction": ["push"] * (steps * envs)}))
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
        team = Team(settings({"lora_rank": 4, "reuse_features": True}), cluster)
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


def test_an_update_from_features_is_that_from_pictures() -> None:
    learned, seen = [], []
    for reused in (False, True):
        algorithm = {"epochs": 2, "minibatches": 2, "micro_batch": 2, "kl_coef": 0.1}
        actor = make_actor(settings({"frozen": ("vision_backbone",), "reuse_features": reused}, algorithm=algorithm))
        torch.manual_seed(0)
        data = trajectories(actor.policy, steps=6)
        looks: list[int] = []
        actor.policy.network.vision_backbone.register_forward_hook(lambda *_, looks=looks: looks.append(1))
        actor.update([data])
        learned.append(actor.policy.learned_state())
        seen.append(len(looks))
    assert seen[0] > 0 and seen[1] == 0
    begun = build_policy(settings(), SPEC).state_dict()
    for name, expected in learned[0].items():
        torch.testing.assert_close(learned[1][name], expected, rtol=0, atol=1e-6)
    assert not torch.equal(learned[1]["network.projector.fc1.weight"], begun["network.projector.fc1.weight"])


def test_a_critic_of_the_state_moves_nothing_else_and_sees_what_the_policy_does_not() -> None:
    config = settings({"value_of_state": True, "value_hidden": (32, 16)}, algorithm={"critic_warmup": 1})
    config = config.model_copy(update={"env": config.env.model_copy(update={"observation": ("state", "image")})})
    policy = build_policy(config, EnvSpec(**{**vars(SPEC), "state_size": 3}))
    shapes = [tuple(layer.weight.shape) for layer in policy.critic.layers if isinstance(layer, torch.nn.Linear)]
    assert shapes == [(32, 3), (16, 32), (1, 16)]
    image = torch.randint(256, (4, 1, SIZE, SIZE, 3), dtype=torch.uint8)
    seen = {"image": image, "instruction": ["push"] * 4, "state": torch.randn(4, 3)}
    prepared = policy.prepare(seen)
    output = policy.act(prepared, False, SlotNoise(0, range(4)))
    other = {**prepared, "state": prepared["state"] + 1}
    for ours, theirs in zip(
        policy.evaluate(prepared, output.token)[:2], policy.evaluate(other, output.token)[:2], strict=True
    ):
        assert torch.equal(ours, theirs)
    assert not torch.equal(policy.value(prepared), policy.value(other))
    assert torch.equal(policy.value(prepared), output.value)
    policy.evaluate(prepared, output.token)[2].sum().backward()
    moved = {
        name for name, parameter in policy.named_parameters() if parameter.grad is not None and parameter.grad.any()
    }
    assert moved and all(name.startswith("critic.") for name in moved)
    policy.observe({"state": seen["state"]}, torch.tensor([True, True, False, True]))
    torch.testing.assert_close(policy.critic.statistics.mean.float(), seen["state"][[0, 1, 3]].mean(0))


def test_a_detached_critic_moves_nothing_else() -> None:
    for detached in (False, True):
        actor = make_actor(settings({"value_detached": detached}))
        data = trajectories(actor.policy)
        observation = {key: value.flatten(0, 1) for key, value in data.observation.items()}
        actor.policy.evaluate(observation, data.token.flatten(0, 1))[2].sum().backward()
        others = [
            p for name, p in actor.policy.named_parameters() if not name.startswith("critic.") and p.grad is not None
        ]
        assert any(p.grad.any() for p in others) is not detached


def test_rollout_and_actor_that_differ_are_told_before_the_first_update() -> None:
    other = build_policy(settings(seed=1), SPEC)
    for parameter in other.parameters():
        parameter.data *= 2
    actor = make_actor(settings())
    with pytest.raises(
        RuntimeError, match="before the first update.*all decisions differ alike, so both sides have other parameters"
    ):
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


def test_a_killed_run_resumes_exactly(tmp_path: Path) -> None:
    """With what a run may hold beyond plain PPO: a reference, a critic that warms up, several rollouts, features."""
    recipe = tmp_path / "picture.yaml"
    algorithm = {"kl_coef": 0.1, "critic_warmup": 1, "epochs": 2, "minibatches": 2, "lr": 1e-3}
    layer = {
        "env": ENV,
        "policy": {"kind": "openvla", "openvla": {"frozen": ["vision_backbone"], "reuse_features": True}},
        "rollout": {"steps": 4, "epochs": 2},
        "algorithm": algorithm,
        "train": {"iterations": 4, "checkpoint_every": 2},
        "evaluation": {"every": 2, "episodes": 4, "final_episodes": 4, "videos": 0, "before": True},
        "tracking": {"wandb": "disabled", "tensorboard": False},
        "cluster": {"cpu_slots": 2, "timeout_s": 120},
    }
    recipe.write_text(yaml.safe_dump(layer))

    def start(root: Path, *words: str) -> subprocess.Popen:
        command = [str(Path(sys.executable).with_name("embodied-rl")), "train", str(recipe), f"run_root={root}", *words]
        return subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=listen_to_interrupts,
        )

    process = start(tmp_path / "broken")
    wait_for_lines(tmp_path / "broken" / "picture", 3, process)
    process.kill()
    finish(process)
    for root, words in (("broken", ["--resume"]), ("unbroken", [])):
        process = start(tmp_path / root, *words)
        said = finish(process)
        assert process.returncode == 0, said
        assert "change      " in said and said.count("before training: success") == (not words)
    broken, unbroken = tmp_path / "broken" / "picture", tmp_path / "unbroken" / "picture"
    assert lines(broken) == lines(unbroken) and len(lines(unbroken)) == 4
    assert parameters(broken, 4) == parameters(unbroken, 4)
    assert lines(unbroken)[3]["losses/kl_reference"] > 0 and lines(unbroken)[0]["env_steps"] == 32
    assert [line["sampling/logprob_gap_max"] < 1e-4 for line in lines(unbroken)] == [True] * 4
