"""The sessions of env servers: how many there may be, how they end, and what is told of them meanwhile."""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from served import Start, connect, wait_until

from envs import session
from envs.base import EnvError, EnvSettings
from envs.client import RemotePool
from envs.pool import EnvPool
from envs.server import EnvServer


def test_a_session_that_is_being_closed_takes_no_others_place(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, close, may_close = start(max_sessions=1), EnvPool.close, threading.Event()

    def slowly(pool: EnvPool) -> None:
        may_close.wait(60)
        close(pool)

    monkeypatch.setattr(EnvPool, "close", slowly)
    connect(server).close()
    wait_until(lambda: all(one.closing for one in server.sessions.values()))
    opened: list[RemotePool] = []
    thread = threading.Thread(target=lambda: opened.append(connect(server)))
    thread.start()
    wait_until(lambda: server.counts["sessions"] == 2 or server.counts["refused"] > 0)
    may_close.set()
    thread.join(60)
    assert len(opened) == 1
    opened[0].close()


@pytest.mark.parametrize("by", ["closing", "silence"])
def test_a_simulator_that_hangs_does_not_hold_the_session_of_a_trainer_that_is_gone(
    start: Start, faulty: EnvSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setitem(session.CLIENT_OPTIONS, "toy:Toy", ("faults",))
    server = start(step_timeout_s=300)
    pool = connect(server)
    env = pool.vector_env(faulty, range(2))
    (held,) = server.sessions.values()
    assert held.pool is not None
    processes = [process.popen for process in held.pool.processes]
    (tmp_path / "reset").write_text("hang")
    pool.send("reset", set=env.key, rows=[0, 1], seeds=None, init_state_ids=None, numbers=[0, 0])
    wait_until(lambda: held.job is not None)
    if by == "closing":
        pool.close()
    else:
        pool._disconnect()  # without a word
        server.limits = replace(server.limits, session_timeout_s=0.5)
    wait_until(lambda: not server.sessions)
    assert [process.poll() is not None for process in processes] == [True, True]
    assert held.pool.replaced == 0


def test_metrics_are_told_while_the_server_counts_what_it_never_did(server: EnvServer) -> None:
    class Counting(Counter[str]):
        def items(self) -> Iterator[tuple[str, int]]:  # type: ignore[override]
            for pair in super().items():
                yield pair
                self["malformed"] += 1

    server.counts = Counting({"messages": 3, "chunks": 2})
    assert server.metrics()["messages_total"] == 3


def test_a_server_that_is_stopped_is_not_taken_for_one_that_refuses(server: EnvServer) -> None:
    pool = connect(server)
    pool._why_not(1.0)  # takes in what happened so far
    pool._handshakes = {"begun": 4, "done": 0}  # libzmq gives up each after 30 s
    assert "does it need a token" in pool._why_not(5.0)
    assert pool._why_not(100.0) == ""
    pool.close()


def test_a_trainer_that_could_give_no_signs_of_life_is_told_so_at_once(
    server: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_once, made = RemotePool._connect, list[zmq.Socket]()

    def refuse_second(pool: RemotePool) -> zmq.Socket:
        if made:
            raise EnvError("too many open files")
        made.append(connect_once(pool))
        return made[0]

    monkeypatch.setattr(RemotePool, "_connect", refuse_second)
    with pytest.raises(EnvError, match="too many open files"):
        connect(server)
    assert made[0].closed
