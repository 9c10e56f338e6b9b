"""What the tests of env servers share: toy envs on a server, and comparisons."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from envs.base import ChunkResult, EnvSettings, VectorEnv
from envs.client import RemotePool
from envs.server import EnvServer
from envs.session import Session

TOY = EnvSettings("toy:Toy", "Toy", observation=("state", "image"))
Start = Callable[..., EnvServer]


def connect(server: EnvServer, **options: object) -> RemotePool:
    return RemotePool(server.address, "toy:Toy", "Toy", **{"timeout_s": 60.0, **options})  # type: ignore[arg-type]


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def forget_session(server: EnvServer) -> Session:
    """Have a server lose the only session it has, which is returned. Its thread may be going through them just now, so
    they are not taken from under its feet."""
    (gone,) = server.sessions.values()
    server.sessions = {}
    return gone


def actions(env: VectorEnv, chunk: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (env.num_envs, chunk, 2)).astype(np.float32)


def assert_equal(one: ChunkResult, other: ChunkResult) -> None:
    for name in ("reward", "terminated", "truncated", "valid", "ended", "lost"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    everywhere = np.ones_like(one.ended)
    for seen, right, rows in (
        (one.observation, other.observation, everywhere),
        (one.final_observation, other.final_observation, one.ended),
    ):
        assert seen.keys() == right.keys()
        for key in seen:
            shown, expected = (np.array(where[key])[rows] for where in (seen, right))  # type: ignore[literal-required]
            np.testing.assert_array_equal(shown, expected)
    for episode, twin in zip(one.episodes, other.episodes, strict=True):
        np.testing.assert_array_equal(episode.actions, twin.actions)
        assert replace(episode, actions=None) == replace(twin, actions=None)
