from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from envs.base import EnvSettings
from envs.pool import EnvPool


@pytest.fixture
def make_pool() -> Iterator[Callable[..., EnvPool]]:
    """Makes pools that are closed after the test."""
    pools: list[EnvPool] = []

    def make(processes: int = 2, timeout_s: float = 30.0) -> EnvPool:
        pools.append(EnvPool(processes, timeout_s))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="session")
def shared_pool() -> Iterator[EnvPool]:
    """Two processes for tests that harm none."""
    pool = EnvPool(2)
    yield pool
    pool.close()


@pytest.fixture
def faulty(tmp_path: Path) -> EnvSettings:
    """A toy env that does what files in tmp_path say."""
    return EnvSettings("toy:Toy", "Toy", simulator={"faults": str(tmp_path)})
