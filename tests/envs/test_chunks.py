"""Chunks, episodes and records of every vector env against a loop of single steps."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy import Toy, ToyGymnasium

from envs.base import EnvSettings, VectorEnv, episode_seed
from envs.episodes import EpisodicVectorEnv
from envs.gymnasium import GymnasiumVectorEnv
from envs.pool import EnvPool
from envs.slots import VectorArgs

CHUNKS = 6
N = 3

cases = st.fixed_dictionaries(
    {
        "chunk": st.sampled_from([1, 2, 4]),
        "seed": st.integers(0, 1000),
        "group_size": st.sampled_from([1, 2]),
        "auto_reset": st.booleans(),
        "horizon": st.sampled_from([None, 3, 7]),
        "ignore_terminations": st.booleans(),
        "success_bonus": st.sampled_from([0.0, 5.0]),
        "reward_scale": st.sampled_from([1.0, 0.1]),
        "fixed_actions": st.sampled_from([{}, {0: 0.5}, {1: -1.0}]),
    }
)


def make_args(case: dict[str, Any]) -> VectorArgs:
    of_env = {k: v for k, v in case.items() if k not in ("chunk", "seed", "group_size", "auto_reset")}
    of_vector = {k: case[k] for k in ("chunk", "seed", "group_size", "auto_reset")}
    return VectorArgs(EnvSettings("toy:Toy", "Toy", **of_env), range(5, 5 + N), record_actions=True, **of_vector)


def plain_loop(args: VectorArgs, env_id: int, actions: np.ndarray) -> list[dict[str, Any]]:
    """What should happen to one env: for each chunk the outcome, written with as little cleverness as possible."""
    chosen, env, number, outcomes = args.settings, Toy(args.settings), 0, []

    def begin() -> dict[str, Any]:
        nonlocal number
        seed = episode_seed(args.seed, env_id // args.group_size, number)
        number += 1
        env.reset(seed, None)
        return {"seed": seed, "rewards": [], "successes": [], "actions": []}

    episode, frozen = begin(), False
    for chunk in actions:
        outcome: dict[str, Any] = {"steps": [], "final": None, "record": None}
        for action in chunk:
            if frozen or outcome["record"]:
                continue
            full = list(action)
            for dim, value in sorted(chosen.fixed_actions.items()):
                full.insert(dim, value)
            raw = env.step(np.array(full, np.float32), True)
            terminated = raw.terminated and not chosen.ignore_terminations
            reward = raw.reward + (chosen.success_bonus if terminated and raw.success else 0)
            reward *= chosen.reward_scale
            episode["rewards"].append(reward)
            episode["successes"].append(raw.success)
            episode["actions"].append(action)
            truncated = not terminated and len(episode["rewards"]) == (chosen.horizon or 30)
            outcome["steps"].append((np.float32(reward), terminated, truncated))
            if terminated or truncated:
                outcome["final"], outcome["record"] = env.observe()["state"], episode
        if outcome["record"] and args.auto_reset:
            episode = begin()
        elif outcome["record"]:
            frozen = True
        outcome["observation"] = env.observe()["state"]
        outcomes.append(outcome)
    return outcomes


def assert_as_in_plain_loop(env: VectorEnv, args: VectorArgs) -> int:
    """Run a vector env beside the loop; returns how many episodes ended."""
    rng = np.random.default_rng(args.seed)
    size = 2 - len(args.settings.fixed_actions)
    actions = rng.uniform(-1, 1, (CHUNKS, N, args.chunk, size)).astype(np.float32)
    expected = [plain_loop(args, env_id, actions[:, row]) for row, env_id in enumerate(args.env_ids)]
    env.reset()
    episodes = 0
    for t in range(CHUNKS):
        result = env.chunk_step(actions[t])
        records = {record.env_id: record for record in result.episodes}
        assert len(records) == len(result.episodes) == int(result.ended.sum())
        for row, env_id in enumerate(args.env_ids):
            outcome = expected[row][t]
            executed = len(outcome["steps"])
            assert result.valid[row].tolist() == [c < executed for c in range(args.chunk)]
            given = list(
                zip(result.reward[row], result.terminated[row].tolist(), result.truncated[row].tolist(), strict=True)
            )
            assert given[:executed] == outcome["steps"]
            assert given[executed:] == [(0.0, False, False)] * (args.chunk - executed)
            np.testing.assert_array_equal(result.observation["state"][row], outcome["observation"])
            assert result.ended[row] == (outcome["record"] is not None) == (env_id in records)
            if episode := outcome["record"]:
                episodes += 1
                record = records[env_id]
                np.testing.assert_array_equal(result.final_observation["state"][row], outcome["final"])
                assert (record.seed, record.length) == (episode["seed"], len(episode["rewards"]))
                assert record.episode_return == pytest.approx(sum(episode["rewards"]), rel=1e-12)
                assert record.success_once == any(episode["successes"])
                assert record.success_at_end == episode["successes"][-1]
                assert record.task == "Toy"
                np.testing.assert_array_equal(record.actions, episode["actions"])
        assert not result.lost.any()
    return episodes


@given(cases)
@settings(max_examples=60, deadline=None)
def test_envs_in_one_process_do_what_a_plain_loop_does(case: dict[str, Any]) -> None:
    args = make_args(case)
    assert_as_in_plain_loop(EpisodicVectorEnv(args), args)


@given(cases)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pooled_envs_do_what_a_plain_loop_does(shared_pool: EnvPool, case: dict[str, Any]) -> None:
    args = make_args(case)
    env = shared_pool.vector_env(
        args.settings, args.env_ids, args.chunk, args.seed, args.group_size, args.auto_reset, args.record_actions
    )
    assert_as_in_plain_loop(env, args)
    env.close()


@given(cases.map(lambda case: {**case, "ignore_terminations": False}))
@settings(max_examples=30, deadline=None)
def test_adapted_gymnasium_vector_envs_do_what_a_plain_loop_does(case: dict[str, Any]) -> None:
    args = make_args(case)
    makers = [lambda: gymnasium.wrappers.TimeLimit(ToyGymnasium(), 30)] * N
    env = gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    adapted = GymnasiumVectorEnv(env, args)
    assert adapted.spec.has_success
    assert_as_in_plain_loop(adapted, args)


def test_the_plain_loop_meets_successes_failures_and_timeouts() -> None:
    """Otherwise the comparisons above would compare little."""
    case = {"chunk": 4, "seed": 3, "group_size": 1, "auto_reset": True, "horizon": 7}
    rng = np.random.default_rng(3)
    loops = [plain_loop(make_args(case), i, rng.uniform(-1, 1, (40, 4, 2)).astype(np.float32)) for i in range(3)]
    ends = [
        (step[1:], o["record"]["successes"][-1])
        for loop in loops
        for o in loop
        if o["record"]
        for step in o["steps"][-1:]
    ]
    assert {((True, False), True), ((True, False), False), ((False, True), False)} <= set(ends)


def test_success_that_passes_is_kept_as_success_once(shared_pool: EnvPool) -> None:
    settings = EnvSettings("toy:Toy", "Toy", horizon=8, ignore_terminations=True)
    env = shared_pool.vector_env(settings, [0], chunk=8, seed=1)
    env.reset()
    right_and_back = np.array([[[1, 0]] * 5 + [[-1, 0]] * 3], np.float32)
    records = [record for _ in range(12) for record in env.chunk_step(right_and_back).episodes]
    assert any(record.success_once and not record.success_at_end for record in records)
    assert all(record.length == 8 for record in records)
    env.close()


def test_partial_reset_leaves_the_other_envs_alone(shared_pool: EnvPool) -> None:
    env = shared_pool.vector_env(EnvSettings("toy:Toy", "Toy"), range(4))
    env.reset()
    before = env.chunk_step(np.zeros((4, 1, 2), np.float32)).observation["state"]
    after = env.reset([1, 3], [7, 8])["state"]
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    assert after[[1, 3], 2].tolist() == [0, 0]
    env.close()


@pytest.mark.parametrize("pooled", [True, False])
def test_misuse_is_refused_with_the_reason(shared_pool: EnvPool, pooled: bool) -> None:
    settings = EnvSettings("toy:Toy", "Toy")
    env: VectorEnv = (
        shared_pool.vector_env(settings, [4, 9]) if pooled else EpisodicVectorEnv(VectorArgs(settings, [4, 9]))
    )
    actions = np.zeros((2, 1, 2), np.float32)
    env.reset()
    with pytest.raises(RuntimeError, match="without a chunk step in flight"):
        env.chunk_step_wait()
    with pytest.raises(ValueError, match=r"expected \(2, 1, 2\)"):
        env.chunk_step(np.zeros((2, 2), np.float32))
    for infinite in (np.nan, 1e300):  # the latter as the float32 that envs get
        with pytest.raises(ValueError, match="env 9 are not finite"):
            env.chunk_step(np.array([[[0, 0]], [[0, infinite]]]))
    with pytest.raises(ValueError, match="names env 2, but there are 2"):
        env.reset([2])
    with pytest.raises(ValueError, match="1 seeds were given for 2 envs"):
        env.reset([0, 1], [5])
    env.chunk_step_async(actions)
    with pytest.raises(RuntimeError, match="in flight"):
        env.reset()
    with pytest.raises(RuntimeError, match="in flight"):
        env.chunk_step_async(actions)
    assert env.chunk_step_wait().valid.all()
    env.close()


def test_fixed_action_that_does_not_exist_is_refused() -> None:
    from envs.base import EnvError

    with pytest.raises(EnvError, match="names dimension 2, but Toy has 0 to 1"):
        EpisodicVectorEnv(VectorArgs(EnvSettings("toy:Toy", "Toy", fixed_actions={2: 0.0}), [0]))
