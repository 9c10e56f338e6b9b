"""Episode seeds belong to the env's number in the run, and states can be restored exactly."""

from collections.abc import Callable
from itertools import pairwise

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from toy import ToyGymnasium

from envs.base import EnvSettings, VectorEnv, episode_seed, evaluation_seed
from envs.episodes import EpisodicVectorEnv
from envs.gymnasium import GymnasiumVectorEnv
from envs.pool import EnvPool
from envs.slots import VectorArgs

TOY = EnvSettings("toy:Toy", "Toy", horizon=5)


def adapted(args: VectorArgs) -> GymnasiumVectorEnv:
    makers = [lambda: gymnasium.wrappers.TimeLimit(ToyGymnasium(), 30)] * len(args.env_ids)
    return GymnasiumVectorEnv(gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP), args)


def run(sets: list[VectorEnv], chunks: int, chunk: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """All observations [T, N, S] and (env id, seed) of all episodes, of sets that share a run's envs."""
    shown, episodes = [np.concatenate([env.reset()["state"] for env in sets])], []
    rng = np.random.default_rng(0)
    for _ in range(chunks):
        actions = rng.uniform(-1, 1, (sum(env.num_envs for env in sets), chunk, sets[0].spec.action.size))
        edges = np.cumsum([0, *(env.num_envs for env in sets)])
        for env, (first, last) in zip(sets, pairwise(edges), strict=True):
            env.chunk_step_async(actions[first:last].astype(np.float32))
        results = [env.chunk_step_wait() for env in sets]
        shown.append(np.concatenate([result.observation["state"] for result in results]))
        episodes += [(episode.env_id, episode.seed) for result in results for episode in result.episodes]
    return np.stack(shown), sorted(episodes)


def test_episodes_do_not_depend_on_processes_or_on_how_envs_are_cut_into_sets(
    make_pool: Callable[..., EnvPool],
) -> None:
    one, two = make_pool(processes=1), make_pool(processes=2)
    cuts = [
        [one.vector_env(TOY, range(6), 2, seed=3)],
        [two.vector_env(TOY, range(6), 2, seed=3)],
        [two.vector_env(TOY, range(3), 2, seed=3), two.vector_env(TOY, range(3, 6), 2, seed=3)],
        [EpisodicVectorEnv(VectorArgs(TOY, range(6), 2, seed=3))],
        [adapted(VectorArgs(TOY, range(2), 2, seed=3)), adapted(VectorArgs(TOY, range(2, 6), 2, seed=3))],
    ]
    runs = [run(sets, chunks=12, chunk=2) for sets in cuts]
    for states, episodes in runs[1:]:
        np.testing.assert_array_equal(states, runs[0][0])
        assert episodes == runs[0][1]
    assert len(runs[0][1]) > 12


def test_envs_of_a_group_begin_the_same_episodes_and_others_do_not() -> None:
    env = EpisodicVectorEnv(VectorArgs(TOY, range(4, 10), group_size=3))  # groups 3-5, 6-8, 9-11
    for _ in range(3):
        states = env.reset()["state"]
        assert (states[0:2] == states[0]).all() and (states[2:5] == states[2]).all()
        assert len({tuple(state) for state in states}) == 3


def test_record_of_an_episode_is_enough_to_begin_it_again() -> None:
    env = EpisodicVectorEnv(VectorArgs(TOY, [0], record_actions=True))
    first = env.reset()["state"]
    episode = next(e for _ in range(9) for e in env.chunk_step(np.zeros((1, 1, 2), np.float32)).episodes)
    np.testing.assert_array_equal(env.reset([0], [episode.seed])["state"], first)
    assert episode.seed == episode_seed(0, 0, 0)


def test_init_state_ids_reach_the_env_and_the_record() -> None:
    env = EpisodicVectorEnv(VectorArgs(TOY, [0, 1]))
    states = env.reset(seeds=[5, 5], init_state_ids=[1, 2])["state"]
    assert (states[0] != states[1]).any()
    for _ in range(5):
        episodes = env.chunk_step(np.zeros((2, 1, 2), np.float32)).episodes
    assert [episode.init_state_id for episode in episodes] == [1, 2]


def test_training_and_evaluation_seeds_never_meet() -> None:
    training = {episode_seed(base, stream, number) for base in range(9) for stream in range(9) for number in range(9)}
    assert len(training) == 9**3 and max(training) < 2**30
    assert all(2**30 <= evaluation_seed(base, number) < 2**31 for base in (0, 2**31 - 1) for number in (0, 10**9))


@pytest.mark.parametrize("kind", ["in process", "pooled", "adapted"])
@pytest.mark.parametrize("auto_reset", [True, False])
def test_restored_env_goes_on_bit_for_bit(make_pool: Callable[..., EnvPool], kind: str, auto_reset: bool) -> None:
    pool = make_pool() if kind == "pooled" else None

    def make() -> VectorEnv:
        if pool:
            return pool.vector_env(TOY, range(4), 2, seed=5, auto_reset=auto_reset)
        args = VectorArgs(TOY, range(4), 2, seed=5, auto_reset=auto_reset)
        return adapted(args) if kind == "adapted" else EpisodicVectorEnv(args)

    rng = np.random.default_rng(1)
    actions = rng.uniform(-1, 1, (12, 4, 2, 2)).astype(np.float32)
    env, fresh = make(), make()
    env.reset()
    if not auto_reset:
        env.reset([1], [9])
    for t in range(4):  # episodes of 5 steps: by now some are in their middle, without auto-reset all are frozen
        env.chunk_step(actions[t])
        if not auto_reset and t == 2:
            env.reset([0, 2])
    saved, shown = env.state(), env.observation()
    np.testing.assert_array_equal(fresh.restore(saved)["state"], shown["state"])
    went_on = [env.chunk_step(a) for a in actions[4:8]]
    restored = [fresh.chunk_step(a) for a in actions[4:8]]
    env.restore(saved)  # the same env, rewound
    rewound = [env.chunk_step(a) for a in actions[4:8]]
    for right, *others in zip(went_on, restored, rewound, strict=True):
        for other in others:
            for name in ("reward", "terminated", "truncated", "valid", "ended"):
                np.testing.assert_array_equal(getattr(right, name), getattr(other, name))
            np.testing.assert_array_equal(right.observation["state"], other.observation["state"])
            assert right.episodes == other.episodes
    assert any(result.episodes for result in went_on) and any(result.valid.any() for result in went_on)


def test_env_that_never_began_is_restored_as_such() -> None:
    env, fresh = (EpisodicVectorEnv(VectorArgs(TOY, range(2))) for _ in range(2))
    env.reset([1])
    fresh.restore(env.state())
    assert fresh.chunk_step(np.zeros((2, 1, 2), np.float32)).valid[:, 0].tolist() == [False, True]
    np.testing.assert_array_equal(fresh.reset([0])["state"][0], env.reset([0])["state"][0])


def test_seeds_that_are_none_of_one_process_leave_no_answer_of_another_behind(shared_pool: EnvPool) -> None:
    env, twin = (shared_pool.vector_env(TOY, range(2), seed=5) for _ in range(2))
    for one in (env, twin):
        one.reset()
    with pytest.raises(TypeError):
        env.reset(seeds=[1, None])  # type: ignore[list-item]
    seeds, right = ([slot["seed"] for slot in one.state()] for one in (env, twin))
    assert seeds == right
    env.close()
    twin.close()
