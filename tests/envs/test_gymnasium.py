"""gymnasium envs, single and vectorised."""

from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from toy import ToyGymnasium

from envs.base import EnvError, EnvSettings, make
from envs.episodes import EpisodicVectorEnv
from envs.gymnasium import GymnasiumEnv, GymnasiumVectorEnv
from envs.pool import EnvPool
from envs.slots import VectorArgs


class FromTwo(ToyGymnasium):
    """Three actions, numbered from 2; says so when it gets another."""

    action_space = gymnasium.spaces.Discrete(3, start=2)

    def step(self, action):
        assert self.action_space.contains(action), action
        return super().step(np.array([action - 3, 0], np.float32))


gymnasium.register("Toy-v0", ToyGymnasium, max_episode_steps=12)
gymnasium.register("FromTwo-v0", FromTwo)


def cartpoles(mode: AutoresetMode, vectorization: str = "sync") -> gymnasium.vector.VectorEnv:
    return gymnasium.make_vec(
        "CartPole-v1", 2, vectorization_mode=vectorization, vector_kwargs={"autoreset_mode": mode}
    )


def test_cartpole_in_the_pool_equals_gymnasium(make_pool: Callable[..., EnvPool]) -> None:
    env = make_pool(processes=1).vector_env(EnvSettings("gymnasium", "CartPole-v1"), [0])
    alone = gymnasium.make("CartPole-v1")
    np.testing.assert_array_equal(env.reset(seeds=[11])["state"][0], alone.reset(seed=11)[0])
    for t in range(60):
        result = env.chunk_step(np.full((1, 1, 1), t % 3 == 0, np.float32))
        observation, reward, terminated, *_ = alone.step(int(t % 3 == 0))
        assert (result.reward[0, 0], result.terminated[0, 0]) == (reward, terminated)
        if terminated:
            np.testing.assert_array_equal(result.final_observation["state"][0], observation)
            return
        np.testing.assert_array_equal(result.observation["state"][0], observation)
    raise AssertionError("no episode ended")


@pytest.mark.parametrize(("horizon", "expected"), [(None, 12), (5, 5), (20, 20)])
def test_horizon_replaces_the_envs_own_limit_in_both_directions(horizon: int | None, expected: int) -> None:
    settings = EnvSettings("gymnasium", "Toy-v0", horizon=horizon, ignore_terminations=True)
    env = EpisodicVectorEnv(VectorArgs(settings, [0]))
    env.reset()
    assert env.spec.horizon == expected
    lengths = [e.length for _ in range(25) for e in env.chunk_step(np.zeros((1, 1, 2), np.float32)).episodes]
    assert lengths[0] == expected


def test_env_is_said_to_have_success_only_if_its_info_does() -> None:
    assert GymnasiumEnv(EnvSettings("gymnasium", "Toy-v0")).has_success
    assert not GymnasiumEnv(EnvSettings("gymnasium", "CartPole-v1")).has_success


def test_discrete_actions_that_do_not_start_at_zero_are_shifted() -> None:
    env = EpisodicVectorEnv(VectorArgs(EnvSettings("gymnasium", "FromTwo-v0"), [0]))
    assert env.spec.action.num_choices == 3 and env.spec.action.low == (0.0,)
    env.reset()
    states = [env.chunk_step(np.full((1, 1, 1), choice, np.float32)).observation["state"][0] for choice in (0, 2)]
    assert states[1][0] - states[0][0] > -0.3


@pytest.mark.parametrize("render", [True, False])
def test_images_are_the_rendered_frames(render: bool) -> None:
    settings = EnvSettings("gymnasium", "Toy-v0", observation=("state", "image"), simulator={"render": render})
    env = EpisodicVectorEnv(VectorArgs(settings, [0, 1], chunk=2))
    assert env.spec.image_shape == (1, 4, 4, 3) and env.spec.state_size == 3
    assert (env.reset()["image"] == 0).all()
    result = env.chunk_step(np.zeros((2, 2, 2), np.float32))
    assert result.observation["image"].dtype == np.uint8 and (result.observation["image"] == 2).all()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (EnvSettings("gymnasium", "NoSuch-v0"), "cannot make NoSuch-v0"),
        (EnvSettings("gymnasium", "FrozenLake-v1"), "only Box observations"),
        (EnvSettings("gymnastics", "CartPole-v1"), "kind 'gymnastics'; known: maniskill, libero, gymnasium"),
        (EnvSettings("toy:Missing", "x"), "'toy:Missing' cannot be imported"),
        (EnvSettings("no_such_module:Env", "x"), "cannot be imported: No module named 'no_such_module'"),
    ],
)
def test_env_that_cannot_be_made_is_refused_with_the_reason(settings: EnvSettings, said: str) -> None:
    with pytest.raises(EnvError, match=said):
        make(settings)


def test_init_states_are_refused_where_there_are_none() -> None:
    env = EpisodicVectorEnv(VectorArgs(EnvSettings("gymnasium", "CartPole-v1"), [0]))
    with pytest.raises(EnvError, match="not from numbered init states"):
        env.reset(init_state_ids=[1])


# --- vector envs; their chunks and episodes are compared with a plain loop in test_chunks.py -------------------


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_vector_env_with_another_auto_reset_is_refused_with_how_to_make_it(mode: AutoresetMode) -> None:
    env = cartpoles(mode)
    with pytest.raises(EnvError, match=rf"autoreset_mode is {mode.name}, SAME_STEP is needed.*vector_kwargs"):
        GymnasiumVectorEnv(env, VectorArgs(EnvSettings("gymnasium", "CartPole-v1"), range(2)))


def test_vector_env_that_cannot_do_what_is_asked_is_refused() -> None:
    env = cartpoles(AutoresetMode.SAME_STEP)
    cartpole = EnvSettings("gymnasium", "CartPole-v1")
    with pytest.raises(EnvError, match="ignore_terminations is not possible"):
        settings = EnvSettings("gymnasium", "CartPole-v1", ignore_terminations=True)
        GymnasiumVectorEnv(env, VectorArgs(settings, range(2)))
    with pytest.raises(EnvError, match="has 2 envs, but 3 env ids"):
        GymnasiumVectorEnv(env, VectorArgs(cartpole, range(3)))
    with pytest.raises(EnvError, match="not from numbered init states"):
        GymnasiumVectorEnv(env, VectorArgs(cartpole, range(2))).reset(init_state_ids=[0, 1])


def test_asynchronous_vector_env_equals_the_pool(shared_pool: EnvPool) -> None:
    settings = EnvSettings("gymnasium", "CartPole-v1", horizon=9)
    env = GymnasiumVectorEnv(cartpoles(AutoresetMode.SAME_STEP, "async"), VectorArgs(settings, range(2), 3))
    pooled = shared_pool.vector_env(settings, range(2), 3)
    np.testing.assert_array_equal(env.reset()["state"], pooled.reset()["state"])
    actions = np.random.default_rng(0).integers(0, 2, (6, 2, 3, 1)).astype(np.float32)
    ended = 0
    for chunk in actions:
        one, other = env.chunk_step(chunk), pooled.chunk_step(chunk)
        np.testing.assert_array_equal(one.observation["state"], other.observation["state"])
        np.testing.assert_array_equal(one.valid, other.valid)
        ended += len(one.episodes)
        if one.ended.any():
            rows = one.ended
            np.testing.assert_array_equal(one.final_observation["state"][rows], other.final_observation["state"][rows])
    assert ended == 4 and not env.spec.has_success
    env.close()
    pooled.close()
