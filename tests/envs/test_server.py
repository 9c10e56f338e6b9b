"""Env servers: the same contract over a socket, and sessions that know nothing of each other."""

import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq
from served import TOY, Start, actions, assert_equal, connect, forget_session, wait_until

from envs import remote, wire
from envs.base import EnvError, EnvSettings
from envs.client import RemotePool
from envs.episodes import EpisodicVectorEnv
from envs.metrics import serve_metrics
from envs.pool import EnvPool
from envs.server import EnvServer
from envs.session import Limits
from envs.slots import VectorArgs

TOKEN = b"a token that is long enough"


@pytest.mark.parametrize("by", ["shared memory", "wire"])
def test_two_sets_of_a_session_do_what_the_pools_own_do(
    server: EnvServer, shared_pool: EnvPool, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "wire":
        monkeypatch.setattr(remote, "map_shared", lambda *_: None)
    pool = connect(server)
    options = {"chunk": 3, "seed": 5, "group_size": 2, "record_actions": True}
    sets = [
        [where.vector_env(TOY, range(4 * s, 4 * s + 4), **options) for s in (0, 1)] for where in (pool, shared_pool)
    ]
    assert [env.is_shared for env in sets[0]] == [by == "shared memory"] * 2  # type: ignore[attr-defined]
    assert sets[0][0].spec == sets[1][0].spec
    for own, right in zip(*sets, strict=True):
        np.testing.assert_array_equal(own.reset()["state"], right.reset()["state"])
        np.testing.assert_array_equal(
            own.reset([1, 3], [7, 8], [0, 2])["image"], right.reset([1, 3], [7, 8], [0, 2])["image"]
        )
    ended = 0
    for t in range(12):
        for envs in sets:
            for env in envs:
                env.chunk_step_async(actions(env, 3, t))
        for own, right in zip(*sets, strict=True):
            result = own.chunk_step_wait()
            assert_equal(result, right.chunk_step_wait())
            ended += len(result.episodes)
            assert [process for process, *_ in result.spans] == [0, 1]
    assert ended > 4
    fresh = pool.vector_env(TOY, range(4), **options)
    fresh.restore(sets[0][0].state())
    assert_equal(fresh.chunk_step(actions(fresh, 3)), sets[0][0].chunk_step(actions(fresh, 3)))
    for env in sets[1]:
        env.close()
    pool.close()


def test_films_come_from_the_server(server: EnvServer) -> None:
    pool = connect(server)
    env = pool.vector_env(TOY, range(2), chunk=30, auto_reset=False, record_actions=True)
    env.reset(seeds=[1, 2])
    episodes = env.chunk_step(actions(env, 30)).episodes
    films = pool.render(replace(TOY, simulator={"render": True}), episodes)
    assert [len(film) for film in films] == [episode.length + 1 for episode in episodes]
    endless = replace(episodes[0], actions=np.zeros((20_000, 2), np.float32))
    with pytest.raises(EnvError, match="films of 20001 frames"):
        pool.render(replace(TOY, simulator={"render": True}), [endless])
    pool.close()


def test_a_process_that_dies_in_one_session_harms_no_other(start: Start, tmp_path: Path) -> None:
    server = start()
    server_pools = lambda: [session.pool for session in server.sessions.values() if session.pool]  # noqa: E731
    one, other = connect(server), connect(server)
    envs = [pool.vector_env(TOY, range(2), seed=3) for pool in (one, other)]
    for env in envs:
        env.reset()
    first = server_pools()[0]
    first.processes[0].popen.kill()
    lost = [env.chunk_step(actions(env, 1)).lost.tolist() for env in envs]
    assert lost == [[True, False], [False, False]]
    assert (one.replaced, one.lost_episodes, other.replaced, other.lost_episodes) == (1, 1, 0, 0)
    with pytest.raises(ValueError, match="no set 7"):
        other.ask("reset", set=7, rows=[0], seeds=None, init_state_ids=None)
    one.close()
    assert envs[1].chunk_step(actions(envs[1], 1)).valid.all()
    other.close()


@pytest.mark.parametrize("comes_back", [True, False])
def test_two_chunks_in_flight_in_a_process_that_dies_are_both_answered_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    server = start(processes=1, step_timeout_s=300)
    one, other = connect(server), connect(server)
    first, second, elsewhere = (pool.vector_env(TOY, range(2)) for pool in (one, one, other))
    for env in (first, second, elsewhere):
        env.reset()
    busy = next(iter(server.sessions.values()))
    assert busy.pool is not None
    process = busy.pool.processes[0].popen
    process.send_signal(signal.SIGSTOP)
    for env in (first, second):
        env.chunk_step_async(actions(env, 1))
    wait_until(lambda: len(busy.stepping) == 2)
    if not comes_back:
        monkeypatch.setattr(sys, "executable", "/bin/false")
    process.kill()
    if comes_back:
        assert first.chunk_step_wait().lost.all()
    else:
        with pytest.raises(EnvError, match="replaced 3 times in a row without success"):
            first.chunk_step_wait()
    wait_until(lambda: not busy.stepping)
    assert second.chunk_step_wait().lost.all()
    assert elsewhere.chunk_step(actions(elsewhere, 1)).valid.all()
    one.close()
    other.close()


def test_what_is_not_served_is_refused_with_what_is(start: Start) -> None:
    server = start(max_sessions=1, max_envs=3)
    with pytest.raises(EnvError, match=r"the server has Toy \(toy:Toy\), and asked for is PushCube-v1 \(maniskill\)"):
        RemotePool(server.address, "maniskill", "PushCube-v1", timeout_s=60)
    for none in (-1, 0):
        with pytest.raises(ValueError, match=f"{none} env processes"):
            connect(server, processes=none)
    pool = connect(server)
    with pytest.raises(EnvError, match="4 envs in one session; the server takes up to 3"):
        pool.vector_env(TOY, range(4))
    with pytest.raises(EnvError, match="takes no option 'faults'"):
        pool.vector_env(replace(TOY, simulator={"faults": "/tmp"}), range(1))
    with pytest.raises(EnvError, match="not Pickle"):
        pool.vector_env(EnvSettings("pickle:Unpickler", "Pickle"), range(1))
    pool.close()


def test_a_simulation_on_a_gpu_is_refused_before_it_is_made(start: Start) -> None:
    pool = RemotePool(start(kind="maniskill", env_id="PushCube-v1").address, "maniskill", "PushCube-v1", timeout_s=60)
    with pytest.raises(EnvError, match="simulates on its CPUs"):
        pool.vector_env(EnvSettings("maniskill", "PushCube-v1", simulator={"sim_backend": "gpu"}), range(1))
    pool.close()


# --- who may speak ------------------------------------------------------------------------------------------


def test_an_address_open_to_others_needs_a_token() -> None:
    for bind in ("tcp://*:0", "tcp://0.0.0.0:7000", "tcp://robot.lan:7000", "tcp://[::]:7000"):
        with pytest.raises(ValueError, match="--token-file"):
            EnvServer("toy:Toy", "Toy", bind)
    for bind in (
        "127.0.0.1:7000",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:port",
        "tcp://127.0.0.1:99999",
    ):
        with pytest.raises(ValueError, match="no address"):
            EnvServer("toy:Toy", "Toy", bind)
    with pytest.raises(ValueError, match="every user of this machine"):
        EnvServer("toy:Toy", "Toy", "ipc://@name")
    for limits in ({"processes": 0}, {"max_sessions": -1}, {"step_timeout_s": float("nan")}):
        with pytest.raises(ValueError, match=f"the limit {next(iter(limits))} is"):
            Limits(**limits)  # type: ignore[arg-type]


def test_an_address_may_be_of_ipv6(start: Start) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    server = start(bind="tcp://[::1]:*")
    assert server.address.startswith("tcp://[::1]:")
    connect(server).close()


def test_a_path_that_is_a_files_or_another_servers_is_left_alone(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    with pytest.raises(ValueError, match="no socket"):
        EnvServer("toy:Toy", "Toy", f"ipc://{file}")
    assert file.read_text() == "mine"
    taken = start(bind=f"ipc://{tmp_path}/server")
    with pytest.raises(ValueError, match="listens at .* already"):
        EnvServer("toy:Toy", "Toy", taken.address)
    connect(taken).close()


def test_only_those_who_know_the_token_get_in_and_what_they_said_cannot_be_said_again(start: Start) -> None:
    server = start(token=TOKEN)
    for wrong in (None, b"another token of some length"):
        with pytest.raises(EnvError, match="token"):
            connect(server, token=wrong)
    with pytest.raises(EnvError, match="it has another token, or none"):
        connect(start(), token=TOKEN)
    port = int(server.address.rpartition(":")[2])
    with Tap(port) as tap:
        pool = RemotePool(f"tcp://127.0.0.1:{tap.port}", "toy:Toy", "Toy", timeout_s=60, token=TOKEN)
        env = pool.vector_env(TOY, range(2))
        env.reset()
        pool.close()
        wait_until(lambda: not server.sessions)
    counted = server.counts["messages"]
    assert counted > 2 and b"reset" not in tap.heard  # what goes over the wire is encrypted
    with socket.create_connection(("127.0.0.1", port), 5) as replay:
        replay.sendall(tap.heard)
        replay.settimeout(2)
        with pytest.raises((TimeoutError, ConnectionResetError)):
            while replay.recv(4096):
                pass
            raise ConnectionResetError
    assert server.counts["messages"] == counted


class Tap:
    """Passes bytes on to a port, and keeps what was said to it."""

    def __init__(self, to: int) -> None:
        self.heard = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self._to = self._listener.getsockname()[1], to

    def __enter__(self) -> "Tap":
        threading.Thread(target=self._pass_on, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _pass_on(self) -> None:
        caller, _ = self._listener.accept()
        self._listener.close()
        server = socket.create_connection(("127.0.0.1", self._to))

        def back() -> None:
            with suppress(OSError):
                while data := server.recv(65536):
                    caller.sendall(data)

        threading.Thread(target=back, daemon=True).start()
        while data := caller.recv(65536):
            self.heard += data
            server.sendall(data)
        server.close()


def test_a_request_that_comes_twice_is_done_once(server: EnvServer) -> None:
    pool = connect(server)
    env = pool.vector_env(TOY, range(1), chunk=1)
    env.reset()
    before = server.counts["replayed"]
    env.chunk_step_async(actions(env, 1))
    assert env._step is not None
    pool._post(env._step, again=True)
    result = env.chunk_step_wait()
    assert env.state()[0]["actions"].shape == (1, 2) and result.valid.sum() == 1
    assert server.counts["replayed"] == before + 1
    pool.close()


def test_an_answer_is_given_again_where_the_connection_broke_and_only_there(server: EnvServer) -> None:
    pool = connect(server)
    env = pool.vector_env(TOY, range(1))
    request = pool.send("state", set=env.key)
    pool.wait(request)
    head = {"protocol": wire.PROTOCOL, "session": pool._key}
    ping = wire.pack({**head, "op": "ping", "awaiting": [request.number] * 3})
    again: zmq.Socket
    with zmq.Context.instance().socket(zmq.DEALER) as again:
        again.setsockopt(zmq.LINGER, 0)
        again.connect(server.address)
        for connection, said in ((pool._socket, ["missing", "missing"]), (again, ["missing", "reply", "missing"])):
            for _ in range(2):
                connection.send_multipart(ping)
            heard = [wire.unpack(connection.recv_multipart()) for _ in said if connection.poll(60_000)]
            assert [next(iter(message)) for message in heard] == said
    malformed = server.counts["malformed"]
    for awaiting in ([request.number] * 5000, {"1": 1}, None):
        pool._say({"op": "ping", "awaiting": awaiting})
    env.reset()
    assert server.counts["malformed"] == malformed + 3
    pool.close()


def test_a_request_in_flight_as_the_session_is_lost_is_answered_the_way_that_the_next_one_has(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    pool = connect(server)
    env, twin = pool.vector_env(TOY, range(2)), EpisodicVectorEnv(VectorArgs(TOY, range(2)))
    assert env.is_shared
    forget_session(server)
    monkeypatch.setattr(remote, "map_shared", lambda *_: None)
    seen, right = env.reset([0, 1], [5, 6]), twin.reset([0, 1], [5, 6])
    assert not env.is_shared and pool.replaced == 2
    np.testing.assert_array_equal(seen["state"], right["state"])
    pool.close()


def test_a_session_whose_opening_the_server_has_forgotten_is_opened_once_more(tmp_path: Path) -> None:
    address, opened = f"ipc://{tmp_path}/server", list[bytes]()
    router: zmq.Socket
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(address)

        def serve() -> None:
            while len(opened) < 3:
                identity, *frames = router.recv_multipart()
                message = wire.unpack(frames)
                if message["op"] == "open":
                    opened.append(message["session"])
                    about = {"processes": 1, "session_timeout_s": 60.0}
                    answer = {"value": about} if len(opened) == 2 else {"error": "open already", "kind": ""}
                    if len(opened) > 1:
                        router.send_multipart([identity, *wire.pack({"reply": message["number"], **answer})])
                elif message["op"] == "ping":
                    router.send_multipart([identity, *wire.pack({"gone": message["session"]})])
                else:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            pool = RemotePool(address, "toy:Toy", "Toy", timeout_s=60)
            assert pool.num_processes == 1
            pool.close()
        finally:
            thread.join(20)
    assert len(set(opened)) == len(opened) == 2


def test_a_server_that_ends_as_a_session_does_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    close, closing, stopped, seen = EnvPool.close, threading.Lock(), threading.Event(), list[bool]()

    def slowly(pool: EnvPool) -> None:
        seen.append(closing.acquire(blocking=False))  # twice at once it would close what is others' by then
        stopped.wait(60)
        time.sleep(0.3)
        close(pool)
        closing.release()

    monkeypatch.setattr(EnvPool, "close", slowly)
    monkeypatch.setattr("envs.server.JOB_S", 60)
    server = EnvServer("toy:Toy", "Toy", "tcp://127.0.0.1:*", limits=Limits(processes=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    connect(server).close()
    wait_until(lambda: bool(seen))
    server.stop(at_once=True)
    stopped.set()
    thread.join(60)
    assert len(seen) == 2 and all(seen) and server._context.closed


def test_a_server_that_cannot_bind_leaves_nothing_that_would_be_waited_for(server: EnvServer) -> None:
    with pytest.raises(zmq.ZMQError, match="in use") as raised:
        EnvServer("toy:Toy", "Toy", server.address)
    tried = raised.tb.tb_next.tb_frame.f_locals["self"]  # type: ignore[union-attr]
    assert tried._context.closed


def test_health_and_metrics_tell_how_the_server_does(start: Start) -> None:
    server = start(drain_s=300)
    port = serve_metrics(server, 0)
    get = lambda path: urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60).read().decode()  # noqa: E731
    pool = connect(server)
    env = pool.vector_env(TOY, range(3), chunk=2)
    env.reset()
    steps = sum(int(env.chunk_step(actions(env, 2)).valid.sum()) for _ in range(3))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4"  # Prometheus refuses what has none
    values = dict(line.split() for line in get("/metrics").splitlines())
    assert values["env_server_envs"] == "3" and values["env_server_sessions"] == "1"
    assert values["env_server_env_steps_total"] == str(steps) and values["env_server_chunks_total"] == "3"
    env.close()
    assert f"env_server_env_steps_total {steps}\nenv_server_sessions 1\nenv_server_envs 0\n" in get("/metrics")
    env = pool.vector_env(TOY, range(3), chunk=2)
    env.reset()
    server.counts["env_steps"] = 123_456_789
    assert "env_server_env_steps_total 123456789\n" in get("/metrics")
    assert get("/healthz") == "ok\n"
    server.stop()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        get("/healthz")
    with pytest.raises(EnvError, match="about to end"):
        connect(server)
    assert env.chunk_step(actions(env, 2)).valid.any()  # who is there may go on for a while
    pool.close()
