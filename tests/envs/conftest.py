import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served import Start

from envs.base import EnvSettings
from envs.pool import EnvPool
from envs.server import EnvServer
from envs.session import Limits


@pytest.fixture
def make_pool() -> Iterator[Callable[..., EnvPool]]:
    """Makes pools that are closed after the test."""
    pools: list[EnvPool] = []

    def make(processes: int = 2, timeout_s: float = 120.0) -> EnvPool:
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


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts servers in threads."""
    running: list[tuple[EnvServer, threading.Thread]] = []

    def begin(
        bind: str = "tcp://127.0.0.1:*",
        token: bytes | None = None,
        kind: str = "toy:Toy",
        env_id: str = "Toy",
        **limits: float,
    ) -> EnvServer:
        allowed = Limits(**{"processes": 2, **limits})  # type: ignore[arg-type]
        server = EnvServer(kind, env_id, bind, token, allowed)
        thread = threading.Thread(target=server.run)
        running.append((server, thread))
        thread.start()
        return server

    yield begin
    for server, _ in running:
        server.stop(at_once=True)
    for _, thread in running:
        thread.join(20)


@pytest.fixture(scope="module")
def server(start: Start) -> EnvServer:
    return start()
