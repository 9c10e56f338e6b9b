"""The actor's update against a plain single-file PPO, and its independence of how the work is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied_rl.config import Config
from embodied_rl.data import Trajectories
from embodied_rl.sums import Sums
from embodied_rl.workers.actor import ActorWorker
from envs.base import ActionSpec, EnvSpec
from scheduler.trace import Trace

T, N, C, A, S = 6, 4, 2, 3, 5
SPEC = EnvSpec(ActionSpec((-1.0,) * A, (1.0,) * A), S, None, 50, "", True)


class FakeContext:
    """What the actor reads of its place: one rank on a CPU."""

    rank, world_size, device_kind, group, name = 0, 1, "cpu", "actor", "actor[0]"


def make_actor(**algorithm: Any) -> ActorWorker:
    settings = {
        "epochs": 2,
        "minibatches": 3,
        "gamma": 0.9,
        "lam": 0.8,
        "normalise_advantage": "minibatch",
        **algorithm,
    }
    config = Config(policy={"chunk": C, "hidden": [8]}, rollout={"steps": T * C}, algorithm=settings)
    actor = ActorWorker.__new__(ActorWorker)
    actor.context, actor.trace = FakeContext(), Trace("actor[0]")  # type: ignore[assignment]
    actor.__init__(config)  # type: ignore[misc]
    actor.build(SPEC)
    return actor


def rollout(actor: ActorWorker, seed: int = 0) -> Trajectories:
    """Trajectories with ends of both kinds, chunks cut short, and garbage wherever nothing happened."""
    g = torch.Generator().manual_seed(seed)
    state, token = torch.randn(T, N, S, generator=g), torch.randn(T, N, C, A, generator=g) * 0.5
    with torch.no_grad():
        flat = {"state": state.flatten(0, 1)}
        logprob, _, value = actor.policy.evaluate(flat, token.flatten(0, 1))
    valid = torch.ones(T, N, C, dtype=torch.bool)
    terminated, truncated = torch.zeros_like(valid), torch.zeros_like(valid)
    terminated[2, 0, 0], valid[2, 0, 1] = True, False  # ended at the first sub-step of its chunk
    truncated[3, 1, 1] = True
    valid[4:, 3], truncated[3, 3, 1] = False, True  # frozen after its end
    reward = torch.rand(T, N, C, generator=g)
    reward[~valid] = float("nan")
    lost = torch.zeros(T, N, dtype=torch.bool)
    return Trajectories(
        {"state": state}, token, logprob.view(T, N, C, A) + 0.05, value.view(T, N),
        torch.randn(T, N, generator=g), reward, terminated, truncated, valid, torch.zeros_like(lost), lost,
        torch.arange(N),
    )  # fmt: skip


def parameters(actor: ActorWorker) -> Tensor:
    return torch.nn.utils.parameters_to_vector(actor.policy.parameters()).detach()


def plain_ppo(actor: ActorWorker, data: Trajectories) -> Tensor:
    """PPO as one would write it in a single file, with loops; returns the parameters after the update."""
    config, policy = actor.config.algorithm, actor.policy
    advantage = torch.zeros(T, N)
    for n in range(N):
        trace = 0.0
        for t in reversed(range(T)):
            if not data.valid[t, n].any():
                trace = 0.0
                continue
            reward = sum(float(data.reward[t, n, c]) for c in range(C) if data.valid[t, n, c])
            ended = bool(data.terminated[t, n].any() or data.truncated[t, n].any())
            bootstrap = 0.0 if data.terminated[t, n].any() else float(data.next_value[t, n])
            delta = reward + config.gamma * bootstrap - float(data.value[t, n])
            trace = delta + (0.0 if ended else config.gamma * config.lam * trace)
            advantage[t, n] = trace
    kept = [(t, n) for t in range(T) for n in range(N) if data.valid[t, n].any()]
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, eps=1e-5)
    generator = torch.Generator().manual_seed(actor.config.seed * 1009)
    for _ in range(config.epochs):
        for rows in torch.randperm(len(kept), generator=generator).tensor_split(config.minibatches):
            picked = [kept[i] for i in rows]
            a = torch.stack([advantage[t, n] for t, n in picked])
            a = (a - a.mean()) / (a.std() + 1e-8)
            policy_terms, value_terms = [], []
            for (t, n), advantage_now in zip(picked, a, strict=True):
                new, _, value = policy.evaluate(
                    {"state": data.observation["state"][t, n][None]}, data.token[t, n][None]
                )
                mask = data.valid[t, n]
                ratio = (new[0][mask].sum() - data.logprob[t, n][mask].sum()).exp()
                clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
                policy_terms.append(-torch.minimum(ratio * advantage_now, clipped * advantage_now))
                value_terms.append(0.5 * (value[0] - (advantage[t, n] + data.value[t, n])) ** 2)
            loss = torch.stack(policy_terms).mean() + config.value_coef * torch.stack(value_terms).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            optimizer.step()
    return torch.nn.utils.parameters_to_vector(policy.parameters()).detach()


def test_an_update_equals_that_of_a_plain_single_file_ppo() -> None:
    modular, plain = make_actor(), make_actor()
    data = rollout(modular)
    modular._learn(data, 0)
    torch.testing.assert_close(parameters(modular), plain_ppo(plain, data), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum-constant"])
@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_the_update_does_not_depend_on_the_micro_batch_size(level: str, aggregation: str) -> None:
    results = []
    for size in (None, 1, 3):
        actor = make_actor(micro_batch=size, ratio_level=level, aggregation=aggregation, entropy_coef=0.01)
        metrics = actor._learn(rollout(actor), 0)
        results.append((parameters(actor), metrics["losses/policy"], metrics["losses/clip_fraction"]))
    for vector, policy_loss, clip_fraction in results[1:]:
        torch.testing.assert_close(vector, results[0][0], rtol=1e-4, atol=1e-6)
        assert policy_loss == pytest.approx(results[0][1], abs=1e-6)
        assert clip_fraction == pytest.approx(results[0][2])


def test_garbage_where_nothing_happened_reaches_no_parameter_and_no_metric() -> None:
    clean, dirty = make_actor(), make_actor()
    data, spoiled = rollout(clean), rollout(dirty)
    gone = ~spoiled.valid.any(-1)
    for name in ("value", "next_value"):
        getattr(spoiled, name)[gone] = float("nan")
    spoiled.logprob[~spoiled.valid] = float("nan")
    spoiled.observation["state"][gone] = float("nan")
    data.reward[~data.valid] = 0.0
    expected, found = clean._learn(data, 0), dirty._learn(spoiled, 0)
    assert expected == found and all(np.isfinite(list(found.values())))
    assert torch.equal(parameters(clean), parameters(dirty))


def test_clip_fraction_is_a_fraction() -> None:
    actor = make_actor(ratio_level="token", lr=0.1)
    assert 0 < actor._learn(rollout(actor), 0)["losses/clip_fraction"] <= 1


def test_every_iteration_shuffles_differently() -> None:
    actor = make_actor()
    first, second = (torch.randperm(24, generator=actor.generator).tolist() for _ in range(2))
    assert first != second


def test_the_update_stops_without_a_step_once_the_divergence_is_beyond_its_target() -> None:
    actor = make_actor(target_kl=1e-9)
    before = parameters(actor)
    data = rollout(actor)
    data.logprob -= 0.5 * torch.rand_like(data.logprob)
    actor._learn(data, 0)
    assert torch.equal(parameters(actor), before)


def test_a_linear_schedule_falls_with_the_iteration_and_not_with_the_number_of_calls() -> None:
    actor = make_actor(lr_schedule="linear", lr=1e-3)
    for _ in range(2):
        assert actor._learn(rollout(actor), 25)["losses/learning_rate"] == pytest.approx(0.75e-3)


class TestGroups:
    """GRPO: one advantage for each env's episode."""

    @staticmethod
    def learn(rewards: list[float], **algorithm: Any) -> tuple[ActorWorker, Tensor, dict[str, float]]:
        actor = make_actor(name="grpo", group_size=2, normalise_advantage="none", **algorithm)
        data = rollout(actor)
        data.valid[:], data.reward[:] = True, 0.0
        data.reward[0, :, 0] = torch.tensor(rewards)
        data.success[-1] = data.reward[0, :, 0] > 0
        before = parameters(actor)
        metrics = actor._learn(data, 0)
        return actor, parameters(actor) - before, metrics

    def test_the_critic_does_not_move(self) -> None:
        actor, _, metrics = self.learn([1, 0, 0, 1])
        fresh = make_actor()
        pairs = zip(actor.policy.critic.parameters(), fresh.policy.critic.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        assert "losses/value" not in metrics

    def test_groups_without_differences_teach_nothing_and_are_reported(self) -> None:
        _, change, metrics = self.learn([1, 1, 0, 0])
        assert torch.equal(change, torch.zeros_like(change))
        assert metrics["grpo/zero_std_fraction"] == 1.0

    def test_filtered_groups_are_left_out_of_the_forward_pass(self) -> None:
        _, _, metrics = self.learn([1, 1, 0, 1], filter_low=0.1, filter_high=0.9)
        assert metrics["losses/samples"] == T * 2
        assert metrics["grpo/kept_fraction"] == 0.5

    def test_an_iteration_whose_groups_are_all_filtered_out_says_so_and_trains_nothing(self) -> None:
        _, change, metrics = self.learn([1, 1, 0, 0], filter_low=0.1, filter_high=0.9)
        assert metrics["grpo/empty_iteration"] == 1.0
        assert torch.equal(change, torch.zeros_like(change))

    def test_a_lost_episode_enters_no_group(self) -> None:
        actor = make_actor(name="grpo", group_size=4, group_advantage="dr_grpo", epochs=1, minibatches=1)
        data = rollout(actor)
        data.valid[:], data.reward[:], data.lost[2, 3] = True, 0.0, True
        data.reward[0, :, 0] = torch.tensor([3.0, 0.0, 0.0, 500.0])
        batch = actor._prepare(data, Sums())
        assert len(batch) == T * 3
        assert sorted(batch.advantage.unique().tolist()) == [-1.0, 2.0]
