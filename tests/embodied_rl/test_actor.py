"""The actor's update against a plain single-file PPO, and its independence of how the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, BackendConfig

from embodied_rl.config import Config
from embodied_rl.data import Trajectories
from embodied_rl.workers.actor import COLLECTIVES, ActorWorker
from embodied_rl.workers.batch import Gathered
from embodied_rl.workers.parity import Limit, disagreement
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


def learn(actor: ActorWorker, data: Trajectories, iteration: int = 0) -> dict[str, float]:
    actor._gather(data)
    return actor._learn(iteration)


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
    learn(modular, data, 0)
    torch.testing.assert_close(parameters(modular), plain_ppo(plain, data), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum-constant"])
@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_the_update_does_not_depend_on_the_micro_batch_size(level: str, aggregation: str) -> None:
    results = []
    for size in (None, 1, 3):
        actor = make_actor(micro_batch=size, ratio_level=level, aggregation=aggregation, entropy_coef=0.01)
        metrics = learn(actor, rollout(actor), 0)
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
    expected, found = learn(clean, data, 0), learn(dirty, spoiled, 0)
    assert expected == found and all(np.isfinite(list(found.values())))
    assert torch.equal(parameters(clean), parameters(dirty))


def test_minibatches_for_which_there_are_no_decisions_are_left_out() -> None:
    results = []
    for minibatches in (2, 5):
        actor = make_actor(minibatches=minibatches, normalise_advantage="none", entropy_coef=0.01)
        data = rollout(actor)
        data.valid[:] = False
        data.valid[0, :2] = True
        results.append((learn(actor, data), parameters(actor)))
    assert results[0][0] == results[1][0] and all(np.isfinite(list(results[0][0].values())))
    assert torch.equal(results[0][1], results[1][1])


def test_clip_fraction_is_a_fraction() -> None:
    actor = make_actor(ratio_level="token", lr=0.1)
    assert 0 < learn(actor, rollout(actor), 0)["losses/clip_fraction"] <= 1


def test_every_iteration_shuffles_differently() -> None:
    actor = make_actor()
    first, second = (torch.randperm(24, generator=actor.generator).tolist() for _ in range(2))
    assert first != second


def test_the_update_stops_without_a_step_once_the_divergence_is_beyond_its_target() -> None:
    actor = make_actor(target_kl=1e-9)
    before = parameters(actor)
    data = rollout(actor)
    data.logprob -= 0.5 * torch.rand_like(data.logprob)
    learn(actor, data, 0)
    assert torch.equal(parameters(actor), before)


def test_a_linear_schedule_falls_with_the_iteration_and_not_with_the_number_of_calls() -> None:
    actor = make_actor(lr_schedule="linear", lr=1e-3)
    for _ in range(2):
        assert learn(actor, rollout(actor), 25)["losses/learning_rate"] == pytest.approx(0.75e-3)


def test_the_learning_rate_rises_after_the_critic_s_warm_up_and_the_critic_s_does_not_wait() -> None:
    actor = make_actor(critic_warmup=2, lr_warmup=3, lr=1e-3, value_lr=1e-2)
    found = [learn(actor, rollout(actor), iteration)["losses/learning_rate"] for iteration in range(2, 7)]
    assert found == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])
    learn(actor, rollout(actor), 2)
    assert [group["lr"] for group in actor.optimizer.param_groups] == pytest.approx([0.25e-3, 1e-2])


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
        metrics = learn(actor, data, 0)
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
        actor._gather(data)
        (batch,) = actor.gathered.batches
        assert len(batch) == T * 3
        assert sorted(batch.advantage.unique().tolist()) == [-1.0, 2.0]

    def test_whitening_is_by_the_whole_batch_and_not_by_each_rollout(self) -> None:
        actor = make_actor(name="grpo", group_size=2, group_advantage="reinforce_baseline", normalise_advantage="none")
        returns = torch.tensor([[3.0, 0.0, 1.0, 1.0], [9.0, 1.0, 0.0, 2.0]])
        for row in returns:
            data = rollout(actor)
            data.valid[:], data.reward[:] = True, 0.0
            data.reward[0, :, 0] = row
            actor._gather(data)
        found: list[Tensor] = []
        actor._optimise = lambda batch, _: found.append(batch.advantage)  # type: ignore[method-assign]
        actor._learn(0)
        centred = (returns.view(-1, 2) - returns.view(-1, 2).mean(1, keepdim=True)).view(2, 1, 4)
        expected = (centred / centred.std()).expand(2, T, 4)
        torch.testing.assert_close(found[0].view(2, T, 4), expected)


class TestActionValues:
    """A policy that values each action of a chunk, as OpenVLA-OFT can."""

    def test_garbage_and_micro_batches_change_nothing(self) -> None:
        results = []
        for size in (None, 1, 5):
            actor = make_actor(micro_batch=size, ratio_level="action", lr=1e-2)
            data = self.with_action_values(actor)
            if size == 1:
                data.value[~data.valid] = float("nan")
            metrics = learn(actor, data)
            results.append((parameters(actor), metrics["losses/value"], metrics["losses/explained_variance"]))
        for vector, value_loss, variance in results[1:]:
            torch.testing.assert_close(vector, results[0][0], rtol=1e-4, atol=1e-6)
            assert value_loss == pytest.approx(results[0][1], rel=1e-5) and variance == pytest.approx(results[0][2])

    def test_advantages_are_those_of_single_actions(self) -> None:
        actor = make_actor(ratio_level="action")
        data = self.with_action_values(actor)
        actor._gather(data)
        (batch,) = actor.gathered.batches
        assert batch.advantage.shape == (len(batch), C) and torch.equal(batch.counts, batch.valid)
        # Env 0 terminates at the first action of chunk 2: what it got there, less what it expected.
        row = int(data.valid[:2].any(-1).sum())  # decisions are ordered by time, then env
        assert float(batch.advantage[row, 0]) == pytest.approx(float(data.reward[2, 0, 0] - data.value[2, 0, 0]))
        assert float(batch.advantage[row, 1]) == 0.0

    @staticmethod
    def with_action_values(actor: ActorWorker) -> Trajectories:
        data = rollout(actor)
        data.value = data.value[..., None] + torch.tensor([0.0, 0.1])
        evaluate = actor.policy.evaluate

        def by_action(observation: dict[str, Tensor], token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logprob, entropy, value = evaluate(observation, token)
            return logprob, entropy, value[:, None] + torch.tensor([0.0, 0.1])

        actor.policy.evaluate = by_action  # type: ignore[method-assign]
        return data


def test_a_warm_up_moves_the_critic_alone() -> None:
    actor = make_actor(critic_warmup=1)
    before = {name: p.clone() for name, p in actor.policy.named_parameters()}
    learn(actor, rollout(actor), 0)
    moved = {name for name, p in actor.policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(name.startswith("critic") for name in moved)
    learn(actor, rollout(actor), 1)
    assert any(not torch.equal(p, before[n]) for n, p in actor.policy.named_parameters() if not n.startswith("critic"))


def test_the_reference_is_the_policy_that_the_run_began_with() -> None:
    """k3 = exp(d) - 1 - d with d = log reference - log policy, over valid tokens: by hand, after an update."""
    actor = make_actor(kl_coef=0.5, epochs=1, minibatches=1, lr=1e-2)
    data, start = rollout(actor), parameters(actor)
    assert learn(actor, data)["losses/kl_reference"] == pytest.approx(0.0, abs=1e-9)  # before the first step
    with torch.no_grad():
        flat = {"state": data.observation["state"].flatten(0, 1)}
        new = actor.policy.evaluate(flat, data.token.flatten(0, 1))[0].view_as(data.logprob)
        begun = make_actor(kl_coef=0.5)
        assert torch.equal(parameters(begun), start)
        d = begun.policy.evaluate(flat, data.token.flatten(0, 1))[0].view_as(data.logprob) - new
    expected = float((d.exp() - 1 - d)[data.valid].mean())
    state = {name: x.clone() for name, x in actor.policy.learned_state().items()}
    assert learn(actor, data)["losses/kl_reference"] == pytest.approx(expected, rel=1e-4) and expected > 1e-6
    assert state.keys() == actor.policy.learned_state().keys()


def test_entropy_is_that_of_a_token_an_action_or_a_chunk() -> None:
    found = {}
    for level in ("token", "action", "chunk"):
        actor = make_actor(entropy_level=level, epochs=1, minibatches=1)
        data = rollout(actor)
        data.valid[:] = True
        found[level] = learn(actor, data)["losses/entropy"]
    assert found["action"] == pytest.approx(A * found["token"]) and found["chunk"] == pytest.approx(C * found["action"])


class TestGathering:
    """Several rollouts make one batch."""

    def test_two_rollouts_are_learned_from_as_one_of_twice_the_envs(self) -> None:
        actor, once = make_actor(), make_actor()
        first, second = rollout(actor, seed=1), rollout(actor, seed=2)
        actor._gather(first)
        learn(actor, second)
        once.gathered = type(actor.gathered)()
        joined = Trajectories.concatenate([first, second])
        once._gather(joined)
        assert len(once.gathered.batches[0]) == sum(int(x.valid.any(-1).sum()) for x in (first, second))
        assert sorted(once.gathered.batches[0].advantage.tolist()) == pytest.approx(
            sorted([*actor_advantages(first), *actor_advantages(second)]), abs=1e-6
        )

    def test_groups_are_sampled_again_until_as_many_remain_as_were_wanted(self) -> None:
        actor = make_actor(name="grpo", group_size=2, filter_low=0.1, filter_high=0.9, filter_rollouts=3)
        actor.config = actor.config.model_copy(update={"env": actor.config.env.model_copy(update={"num_envs": N})})
        mixed, flat = self.with_success([1, 0, 1, 1]), self.with_success([1, 1, 0, 0])
        actor._gather(mixed)
        assert not actor._has_enough()  # one group of two
        actor._gather(flat)
        assert not actor._has_enough()
        actor._gather(mixed)
        assert actor._has_enough() and actor.gathered.groups == 2
        assert actor._learn(0)["losses/samples"] == 2 * 2 * T
        assert actor.gathered.groups == 0 and not actor.gathered.batches

    def test_sampling_again_has_an_end(self) -> None:
        actor = make_actor(name="grpo", group_size=2, filter_low=0.1, filter_high=0.9, filter_rollouts=2)
        for enough in (False, True):
            actor._gather(self.with_success([1, 1, 0, 0]))
            assert actor._has_enough() is enough
        assert actor._learn(0)["grpo/empty_iteration"] == 1.0

    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_ranks_that_take_over_from_two_have_what_those_had_once(self, ranks: int) -> None:
        """Shares of 4 and of 2 envs; of the first rollout a group of each remains, of the second none."""
        had = []
        for envs, success in ((slice(0, 4), [1, 0, 1, 1]), (slice(0, 2), [1, 0, 1, 1])):
            actor = make_actor(name="grpo", group_size=2, filter_low=0.1, filter_high=0.9)
            actor._gather(part_of(self.with_success(success), envs))
            actor._gather(part_of(self.with_success([1, 1, 1, 1]), envs))
            had.append(actor.gathered)
        found = [Gathered.dealt(had, rank, ranks) for rank in range(ranks)]
        for number, envs in enumerate((4, 0)):
            tokens = [gathered.batches[number].token for gathered in found]
            assert sum(map(len, tokens)) == T * envs
            whole = [gathered.batches[number].token for gathered in had]
            assert torch.equal(torch.cat(tokens).sum((1, 2)).sort()[0], torch.cat(whole).sum((1, 2)).sort()[0])
            assert sum(gathered.seen[number]["valid"].shape[1] for gathered in found) == 6
        assert sum(gathered.groups for gathered in found) == 2
        shares = sum(gathered.counts["grpo/kept_fraction"] for gathered in found)
        assert shares.tolist() == [4.0, 12.0]

    @staticmethod
    def with_success(success: list[float]) -> Trajectories:
        data = rollout(make_actor())
        data.valid[:], data.reward[:] = True, 0.0
        data.reward[0, :, 0] = torch.tensor(success)
        data.success[-1] = data.reward[0, :, 0] > 0
        return data


def part_of(data: Trajectories, envs: slice) -> Trajectories:
    """Some of the envs."""
    own = {name: x[:, envs] for name, x in vars(data).items() if name not in ("observation", "env_ids")}
    return Trajectories({key: x[:, envs] for key, x in data.observation.items()}, env_ids=data.env_ids[envs], **own)


def actor_advantages(data: Trajectories) -> list[float]:
    actor = make_actor()
    actor._gather(data)
    return actor.gathered.batches[0].advantage.tolist()


class TestParity:
    """Sampler and trainer must have the same policy."""

    VALID = torch.ones(8, 2, dtype=torch.bool)
    SLOTS = torch.tensor([[row // 4, 10 + row % 4] for row in range(8)])

    EXACT = Limit.of(torch.nn.Linear(1, 1))
    COARSE = Limit.of(torch.nn.ModuleList([torch.nn.Linear(1, 1).bfloat16(), torch.nn.Linear(1, 1)]))

    def test_rounding_is_no_disagreement(self) -> None:
        logprob = torch.zeros(8, 2, 3)
        assert disagreement(logprob, logprob + 0.05, self.VALID, self.SLOTS, self.COARSE) is None
        assert disagreement(logprob, logprob + 1e-3, self.VALID, self.SLOTS, self.EXACT) is None
        assert disagreement(logprob, logprob + 0.05, self.VALID, self.SLOTS, self.EXACT) is not None

    @pytest.mark.parametrize("limit", [EXACT, COARSE])
    def test_a_single_token_far_off_is_a_disagreement(self, limit: Limit) -> None:
        logprob = torch.zeros(64, 1, 7)
        sampled = logprob.clone()
        sampled[63, 0, 6] = -40.0  # 0.09 on average
        valid, slots = torch.ones(64, 1, dtype=torch.bool), torch.zeros(64, 2, dtype=torch.long)
        assert "40 at most" in (disagreement(logprob, sampled, valid, slots, limit) or "")

    def test_another_temperature_is_a_disagreement(self) -> None:
        logits = torch.randn(200, 1, 7, 256, generator=torch.Generator().manual_seed(0))
        tokens = torch.distributions.Categorical(logits=logits).sample()[..., None]
        score = lambda temperature: (logits / temperature).log_softmax(-1).gather(-1, tokens)[..., 0]  # noqa: E731
        valid, slots = torch.ones(200, 1, dtype=torch.bool), torch.zeros(200, 2, dtype=torch.long)
        problem = disagreement(score(1.0), score(1.05), valid, slots, self.EXACT)
        assert problem and "another temperature" in problem

    @pytest.mark.parametrize(
        ("where", "cause"),
        [
            ((slice(None), slice(None), slice(None)), "other parameters, another temperature"),
            ((slice(None), slice(None), slice(1, None)), "what was read before them differs"),
            ((slice(0, 3), slice(None), slice(None)), "what was stored of their observations"),
        ],
    )
    def test_a_disagreement_is_told_with_its_place_and_likely_cause(self, where: Any, cause: str) -> None:
        logprob, sampled = torch.zeros(8, 2, 3), torch.zeros(8, 2, 3)
        sampled[where] = 0.5
        sampled[2, 1, 2] = 2.0
        problem = disagreement(logprob, sampled, self.VALID, self.SLOTS, self.EXACT)
        assert problem and cause in problem
        assert "2 at most (rounding: 0.1): dimension 2 of action 1, chunk step 0, env 12" in problem

    def test_what_was_not_executed_does_not_count(self) -> None:
        logprob, valid = torch.zeros(8, 2, 3), self.VALID.clone()
        valid[:, 1] = False
        sampled = logprob.clone()
        sampled[:, 1] = float("nan")
        assert disagreement(logprob, sampled, valid, self.SLOTS, self.EXACT) is None

    def test_the_gap_is_measured_before_the_first_step_of_an_iteration(self) -> None:
        actor = make_actor(epochs=3, lr=0.1)
        metrics = learn(actor, rollout(actor))
        assert metrics["sampling/logprob_gap_mean"] == pytest.approx(0.05, rel=1e-3)  # what `rollout` adds
        assert metrics["sampling/logprob_gap_max"] == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_sum_what_is_on_their_device_and_what_is_on_the_host(device: str) -> None:
    assert {"cpu", device} <= BackendConfig(Backend(COLLECTIVES[device])).get_device_backend_map().keys()


class TestRanks:
    """Two ranks with shares of 4 and of 2 envs."""

    def test_all_know_the_groups_of_all(self, tmp_path: Path) -> None:
        for metrics in on_two_ranks(learn_from_groups, tmp_path):
            # Flat: none of 2 groups, and the only one. Kept: both, and none.
            assert metrics["grpo/zero_std_fraction"] == pytest.approx(1 / 3)
            assert metrics["grpo/kept_fraction"] == pytest.approx(4 / 6)

    def test_all_observe_what_all_have_seen(self, tmp_path: Path) -> None:
        alone = make_actor()
        for envs in (slice(0, 4), slice(0, 2)):
            state = rollout(alone).observation["state"][:, envs]
            alone._observe({"state": state, "valid": torch.ones(state.shape[:2], dtype=torch.bool)})
        for found in on_two_ranks(observe, tmp_path):
            assert all(torch.equal(x, found[name]) for name, x in alone.policy.learned_state().items())


def learn_from_groups(actor: ActorWorker) -> dict[str, float]:
    algorithm = make_actor(name="grpo", group_size=2, filter_low=0.1, filter_high=0.9).config.algorithm
    actor.config = actor.config.model_copy(update={"algorithm": algorithm})
    data = TestGathering.with_success([1, 1, 1, 0] if actor.rank else [1, 0, 1, 0])
    return learn(actor, part_of(data, slice(0, 4 - 2 * actor.rank)))


def observe(actor: ActorWorker) -> dict[str, Tensor]:
    state = rollout(actor).observation["state"][:, : 4 - 2 * actor.rank]
    actor._observe({"state": state, "valid": torch.ones(state.shape[:2], dtype=torch.bool)})
    return actor.policy.learned_state()


def on_two_ranks(work: Callable[[ActorWorker], Any], folder: Path) -> list[Any]:
    """What it gives in each of two processes."""
    torch.multiprocessing.spawn(run_rank, (work, folder), nprocs=2)
    return [torch.load(folder / str(rank)) for rank in range(2)]


def run_rank(rank: int, work: Callable[[ActorWorker], Any], folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    actor = make_actor()
    actor.context.rank, actor.context.world_size = rank, 2  # type: ignore[misc]
    torch.save(work(actor), folder / str(rank))
    dist.destroy_process_group()
