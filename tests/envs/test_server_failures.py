"""Env servers that are killed, stopped, replaced or asked to end: what the trainer's side loses, does and says."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from served import Start, connect, wait_until

from envs import child, remote
from envs.base import EnvError, EnvSettings, VectorEnv, episode_seed
from envs.client import RemotePool
from envs.launch import ServerProcess
from envs.pool import EnvPool
from envs.server import EnvServer

TOY = EnvSettings("toy:Toy", "Toy")
Serve = Callable[..., ServerProcess]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/server"


@pytest.fixture
def by_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything goes through the server, as from another machine."""
    monkeypatch.setattr(remote, "map_shared", lambda *_: None)


@pytest.fixture
def serve(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.chdir(Path(__file__).parent)
    started: list[ServerProcess] = []

    def begin(kind: str = "toy:Toy", *options: str) -> ServerProcess:
        started.append(ServerProcess([kind, "Toy", "--bind", address, "--processes", "1", *options]))
        return started[-1]

    yield begin
    for server in started:
        if server.popen.poll() is None:
            server.popen.kill()
        server.close()


def actions(env: VectorEnv) -> np.ndarray:
    return np.full((env.num_envs, env.args.chunk, 2), 0.01, np.float32)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("by_the_wire")
def test_a_server_that_is_killed_and_restarted_costs_the_running_episodes_and_no_more(
    serve: Serve, address: str, make_pool: Callable[..., EnvPool]
) -> None:
    server = serve()
    pool = RemotePool(address, "toy:Toy", "Toy", timeout_s=60)
    going, frozen = pool.vector_env(TOY, [0, 1], seed=1), pool.vector_env(TOY, [2, 3], seed=1, auto_reset=False)
    evaluated = pool.vector_env(TOY, [4], seed=1, auto_reset=False)
    going.reset()
    frozen.reset()
    going.chunk_step(actions(going))
    os.kill(server.popen.pid, signal.SIGSTOP)  # so that the next chunk is not done before it is killed
    going.chunk_step_async(actions(going))
    server.popen.kill()
    server.popen.wait()
    serve()
    result = going.chunk_step_wait()
    assert result.lost.all() and not result.valid.any() and not result.ended.any()
    assert (pool.replaced, pool.lost_episodes) == (1, 4)
    twin = make_pool(1).vector_env(TOY, [0, 1])
    twin.reset(seeds=[episode_seed(1, env_id, 1) for env_id in (0, 1)])
    np.testing.assert_array_equal(result.observation["state"], twin.observation()["state"])  # the next episodes
    assert frozen.chunk_step(actions(frozen)).lost.all()  # it was not in flight: it is told by its next chunk
    assert not frozen.chunk_step(actions(frozen)).valid.any()
    evaluated.reset([0], [9])
    assert evaluated.chunk_step(actions(evaluated)).valid.all()
    after = going.chunk_step(actions(going))
    assert after.valid.all() and not after.lost.any()
    assert [slot["number"] for slot in going.state()] == [2, 2]
    pool.close()


@pytest.mark.parametrize("auto_reset", [True, False])
def test_a_reset_during_which_the_server_is_killed_uses_up_no_seed(
    serve: Serve, address: str, auto_reset: bool
) -> None:
    server = serve()
    pool = RemotePool(address, "toy:Toy", "Toy", timeout_s=60)
    env = pool.vector_env(TOY, [0, 1], seed=1, auto_reset=auto_reset)
    env.reset()
    env.chunk_step(actions(env))

    def restart_once_asked() -> None:
        wait_until(lambda: any(request.op == "reset" for request in list(pool._pending.values())))
        server.popen.kill()
        server.popen.wait()
        serve()

    os.kill(server.popen.pid, signal.SIGSTOP)
    accident = threading.Thread(target=restart_once_asked)
    accident.start()
    states = env.reset()["state"]
    accident.join()
    assert (pool.replaced, pool.lost_episodes) == (1, 0)  # the running ones were to end anyway
    twin = RemotePool(address, "toy:Toy", "Toy", timeout_s=60)
    other = twin.vector_env(TOY, [0, 1])
    np.testing.assert_array_equal(states, other.reset(seeds=[episode_seed(1, env_id, 1) for env_id in (0, 1)])["state"])
    assert [slot["number"] for slot in env.state()] == [2, 2]
    assert env.chunk_step(actions(env)).valid.all()
    pool.close()
    twin.close()


class Eager(zmq.Context):
    """Whose sockets connect again at once."""

    class _socket_class(zmq.Socket):  # noqa: N801 (pyzmq's name)
        def connect(self, address: str) -> Any:
            self.setsockopt(zmq.RECONNECT_IVL, 1)
            self.setsockopt(zmq.RECONNECT_IVL_MAX, 0)
            return super().connect(address)


@pytest.mark.parametrize("there", ["nobody", "somebody else"])
def test_a_server_that_is_away_for_long_while_nothing_is_asked_holds_up_no_other_socket(
    start: Start, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    context = Eager()
    monkeypatch.setattr(zmq.Context, "instance", lambda: context)
    server = start()
    pool = RemotePool(server.address, "toy:Toy", "Toy", timeout_s=60)
    server.stop(at_once=True)
    wait_until(lambda: server._context.closed)
    if there == "nobody":
        time.sleep(3.0)  # about a thousand tries, three events each
    else:
        with socket.create_server(("127.0.0.1", int(server.address.rpartition(":")[2]))) as listener:
            listener.settimeout(30)
            for _ in range(2500):
                listener.accept()[0].close()
    one, other = context.socket(zmq.PAIR), zmq.Context().socket(zmq.PAIR)
    one.connect(f"tcp://127.0.0.1:{other.bind_to_random_port('tcp://127.0.0.1')}")
    one.send(b"")
    assert other.poll(60_000)
    pool.close()
    for end in (one, other):
        end.close()


@pytest.mark.usefixtures("by_the_wire")
def test_a_server_that_stops_for_a_while_costs_nothing_and_for_too_long_ends_the_run(
    serve: Serve, address: str
) -> None:
    server = serve()
    pool = RemotePool(address, "toy:Toy", "Toy", timeout_s=60)
    env = pool.vector_env(TOY, [0])
    env.reset()
    os.kill(server.popen.pid, signal.SIGSTOP)
    env.chunk_step_async(actions(env))
    time.sleep(0.5)
    os.kill(server.popen.pid, signal.SIGCONT)
    assert env.chunk_step_wait().valid.all() and pool.lost_episodes == 0
    pool.timeout_s = 4  # now that no answer is to come that may take longer
    os.kill(server.popen.pid, signal.SIGSTOP)
    with pytest.raises(
        EnvError, match=rf"{address} was silent for \d+ s \(step\); is it running there, and not stopped"
    ):
        env.chunk_step(actions(env))
    os.kill(server.popen.pid, signal.SIGCONT)
    pool.close()


def test_on_one_host_chunks_go_on_while_the_server_is_stopped_until_it_is_needed(
    serve: Serve, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RUNG_S", 60.0)  # a chunk that takes long on a busy machine is asked about
    server = serve()
    pool = RemotePool(address, "toy:Toy", "Toy", timeout_s=60)
    env = pool.vector_env(TOY, [0])
    env.reset()
    env.chunk_step(actions(env))
    os.kill(server.popen.pid, signal.SIGSTOP)
    for _ in range(3):
        assert env.chunk_step(actions(env)).valid.all()
    pool.timeout_s = 4
    with pytest.raises(EnvError, match=rf"{address} was silent for \d+ s \(reset\)"):
        env.reset()
    os.kill(server.popen.pid, signal.SIGCONT)
    pool.close()


def test_a_session_of_which_an_impatient_server_hears_no_chunks_lives(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RUNG_S", 60.0)  # a chunk that takes long on a busy machine is asked about
    pool = connect(start(session_timeout_s=4.0))  # in this process: neither is stopped without the other
    env = pool.vector_env(replace(TOY, horizon=10**6, ignore_terminations=True), [0])  # of ends it would hear
    env.reset()
    began = time.monotonic()
    while time.monotonic() - began < 6:
        assert env.chunk_step(actions(env)).valid.all()
        time.sleep(0.05)
    assert len(env.state()) == 1 and pool.lost_episodes == 0
    pool.close()


def test_on_one_host_a_server_that_is_killed_and_restarted_costs_the_running_episodes(
    serve: Serve, address: str
) -> None:
    server = serve()
    pool = RemotePool(address, "toy:Toy", "Toy", timeout_s=60)
    sets = [pool.vector_env(TOY, [2 * s, 2 * s + 1], seed=1) for s in range(2)]
    for env in sets:
        env.reset()
        env.chunk_step(actions(env))
    server.popen.kill()
    server.popen.wait()
    wait_until(lambda: all(env._bells._poller.poll(0) for env in sets))  # the env process has ended as well
    serve()
    for env in sets:
        env.chunk_step_async(actions(env))
    assert all(env.chunk_step_wait().lost.all() for env in sets)
    assert (pool.replaced, pool.lost_episodes) == (1, 4)
    for _ in range(2):
        assert all(env.chunk_step(actions(env)).valid.all() for env in sets)
    assert [slot["number"] for env in sets for slot in env.state()] == [2, 2, 2, 2]
    pool.close()


@pytest.mark.usefixtures("by_the_wire")
def test_a_server_does_not_take_its_own_stop_for_its_trainers_silence(serve: Serve, address: str) -> None:
    server = serve("toy:Toy", "--session-timeout", "8")
    pools = [RemotePool(address, "toy:Toy", "Toy", timeout_s=60) for _ in range(3)]
    envs = [pool.vector_env(TOY, [0]) for pool in pools]
    for env in envs:
        env.reset()
    os.kill(server.popen.pid, signal.SIGSTOP)
    time.sleep(10)
    os.kill(server.popen.pid, signal.SIGCONT)
    assert all(env.chunk_step(actions(env)).valid.all() for env in envs)
    assert [pool.lost_episodes for pool in pools] == [0, 0, 0]
    for pool in pools:
        pool.close()


def test_a_server_that_comes_back_with_something_else_ends_the_run_with_the_difference(
    serve: Serve, address: str
) -> None:
    server = serve("toy:Toy")
    pool = RemotePool(address, "toy:Toy", "Toy", timeout_s=30)
    env = pool.vector_env(TOY, [0])
    env.reset()
    server.popen.kill()
    server.popen.wait()
    Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
    serve("toy:OtherToy")
    with pytest.raises(EnvError, match=r"the server has Toy \(toy:OtherToy\), and asked for is Toy \(toy:Toy\)"):
        env.chunk_step(actions(env))
    pool.close()


def test_an_env_that_is_another_behind_the_same_name_is_noticed(
    serve: Serve, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    pool = RemotePool(address, "toy:Toy", "Toy", timeout_s=30)
    env = pool.vector_env(TOY, [0])
    env.reset()
    server.popen.kill()
    server.popen.wait()
    monkeypatch.setenv("TOY_HORIZON", "7")
    serve()
    with pytest.raises(EnvError, match="came back with other envs: horizon was 30 and is 7"):
        env.chunk_step(actions(env))
    pool.close()


def test_a_server_asked_to_end_waits_for_its_sessions_and_a_trainer_that_dies_leaves_no_process(
    serve: Serve, address: str
) -> None:
    server = serve()
    pool = RemotePool(address, "toy:Toy", "Toy")
    env = pool.vector_env(TOY, [0])
    env.reset()
    server.popen.terminate()
    assert env.chunk_step(actions(env)).valid.all()
    pool.close()
    assert server.popen.wait(60) == 0
    program = (
        "import os\nfrom envs.launch import ServerProcess\n"
        f"print(ServerProcess(['toy:Toy', 'Toy', '--bind', '{address}']).popen.pid, flush=True)\nos._exit(1)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60).stdout
    assert said.strip()
    wait_until(lambda: not Path(f"/proc/{said.strip()}").exists())


def test_a_server_that_cannot_start_says_so(serve: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EnvError, match="did not start"):
        ServerProcess(["toy:Toy", "Toy", "--bind", "tcp://*:0"])
    assert "give --token-file" in capfd.readouterr().err
    with pytest.raises(EnvError, match="cannot be started"):
        ServerProcess(["toy:Toy", "Toy"], python="/nowhere/python")


def test_an_address_is_left_as_its_server_cannot_go_on_and_not_where_it_is_anothers_by_now(
    serve: Serve, address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvError, match="did not start"):
            serve("toy:Toy", f"--metrics-port={port}")
    assert f"env server: --metrics-port {port}: [Errno 98] Address already in use" in capfd.readouterr().err
    place = Path(address.removeprefix("ipc://"))
    assert not place.exists()
    server = EnvServer("toy:Toy", "Toy", address)
    place.unlink()
    place.write_text("another's")
    server.close()
    assert place.read_text() == "another's"


def test_a_server_whose_start_is_broken_off_goes_too(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ServerProcess] = []

    def interrupt(server: ServerProcess) -> str:
        started.append(server)
        raise KeyboardInterrupt

    monkeypatch.setattr(ServerProcess, "_await_address", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ServerProcess(["toy:Toy", "Toy", "--bind", address])
    assert started[0].popen.returncode is not None


def test_what_lies_in_the_working_directory_shadows_nothing_of_a_child_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    for name in ("envs", "runpy", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    command = child.command(sys.executable, "envs.wire", [])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
