"""A policy behind a websocket: the actions that it takes itself, by our client and by bytes as openpi writes them."""

import asyncio
import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import websockets.sync.client
import websockets.sync.server
from typer.testing import CliRunner
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.utils import accept_key

from embodied_rl import policy_client, policy_server
from embodied_rl.build import build_policy
from embodied_rl.checkpoint import save_checkpoint
from embodied_rl.cli import app
from embodied_rl.config import Config
from embodied_rl.policy_client import PolicyClient, pack, unpack
from embodied_rl.policy_server import ServedPolicy, read_observation, run_policy_server
from envs.base import ActionSpec, EnvSpec
from envs.wire import plain_spec

SPEC = EnvSpec(ActionSpec((-1.0, -2.0), (1.0, 2.0)), 4, None, 10, "push", True)
TOKEN = "a token that is long enough"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Config(policy={"hidden": [8], "chunk": 3})
    policy = build_policy(config, SPEC)
    state = {"env": plain_spec(SPEC)}
    parts = {"policy": policy.learned_state()}
    return save_checkpoint(tmp_path_factory.mktemp("run"), 1, parts, state, config.model_dump(mode="json"), 1)


@pytest.fixture(scope="module")
def port(checkpoint: Path) -> Iterator[int]:
    loop, ports, known = asyncio.new_event_loop(), [], threading.Event()

    def started(port: int) -> None:
        ports.append(port)
        known.set()

    served = run_policy_server(ServedPolicy(checkpoint), "127.0.0.1", 0, TOKEN.encode(), started)
    task = loop.create_task(served)

    def run() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            return

    thread = threading.Thread(target=run)
    thread.start()
    assert known.wait(60)
    yield ports[0]
    loop.call_soon_threadsafe(task.cancel)
    thread.join(20)


def test_the_client_gets_the_policys_own_actions_for_one_env_and_for_several(port: int, checkpoint: Path) -> None:
    client = PolicyClient(f"ws://127.0.0.1:{port}", TOKEN)
    assert client.metadata["chunk"] == 3 and client.metadata["action_high"] == [1.0, 2.0]
    states = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    with torch.no_grad():
        right = ServedPolicy(checkpoint).policy.act({"state": torch.from_numpy(states)}, True, None).action.numpy()
    np.testing.assert_array_equal(client.infer({"state": states})["actions"], right)
    one = client.infer({"observation/state": states[2], "prompt": "push"})
    assert one["actions"].shape == (3, 2) and one["server_timing"]["infer_ms"] > 0
    np.testing.assert_allclose(one["actions"], right[2], rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"state has shape \(3,\); expected \(4,\)"):
        client.infer({"state": np.zeros(3, np.float32)})
    assert client.infer({"state": states})["actions"].shape == (5, 3, 2)  # the connection goes on
    client.close()


def test_bytes_as_openpis_client_writes_them_are_understood_and_answered_alike(port: int) -> None:
    headers = {"Authorization": f"Api-Key {TOKEN}"}
    with websockets.sync.client.connect(f"ws://127.0.0.1:{port}", additional_headers=headers) as socket:
        assert msgpack.unpackb(socket.recv())["policy"] == "mlp"
        array = {b"__ndarray__": True, b"data": np.ones(4).tobytes(), b"dtype": "<f8", b"shape": (4,)}
        socket.send(msgpack.packb({"observation/state": array, "prompt": "push"}))
        answer = msgpack.unpackb(socket.recv())["actions"]
        assert answer[b"dtype"] == "<f4" and answer[b"shape"] == [3, 2] and len(answer[b"data"]) == 24
        forged = {b"__ndarray__": True, b"data": b"cos\nsystem", b"dtype": "|O", b"shape": (1,)}
        socket.send(msgpack.packb({"observation/state": forged}))
        assert "not an observation" in socket.recv()


def test_only_those_with_the_token_are_admitted_and_anybody_may_ask_for_its_health(port: int) -> None:
    for token in (None, "another one"):
        with pytest.raises(InvalidStatus, match="401"):
            PolicyClient(f"ws://127.0.0.1:{port}", token)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest("GET", "/")
    for token in (TOKEN, "another one"):
        connection.putheader("Authorization", f"Api-Key {token}")
    for name, value in {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}.items():
        connection.putheader(name, value)
    connection.putheader("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200


def test_pictures_are_put_together_as_the_envs_cameras() -> None:
    spec = EnvSpec(SPEC.action, None, (2, 8, 8, 3), 10, "push", True)
    table, wrist = np.zeros((8, 8, 3), np.uint8), np.ones((8, 8, 3), np.uint8)
    seen, is_single = read_observation({"observation/image": table, "observation/wrist_image": wrist}, spec)
    assert (
        is_single
        and seen["image"].shape == (1, 2, 8, 8, 3)
        and seen["image"].mean(axis=(0, 2, 3, 4)).tolist() == [0, 1]
    )
    assert seen["instruction"] == ["push"]
    for dtype in (np.float32, np.int64):
        with pytest.raises(ValueError, match=f"image is {dtype.__name__}; expected uint8"):
            read_observation({"image": np.full((2, 8, 8, 3), 300, dtype)}, spec)
    for lacking in ({}, {"observation/wrist_image": wrist}):
        with pytest.raises(ValueError, match="image is missing; this policy sees image"):
            read_observation(lacking, spec)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_values_that_are_not_finite_are_refused(value: float, port: int) -> None:
    client = PolicyClient(f"ws://127.0.0.1:{port}", TOKEN)
    with pytest.raises(RuntimeError, match="state holds values that are not finite"):
        client.infer({"state": np.array([0.0, value, 0.0, 0.0])})
    client.close()


@pytest.mark.parametrize("said", [None, 5, [1], {"push": 1}, b"push"])
def test_an_instruction_that_is_no_words_is_refused(said: object) -> None:
    with pytest.raises(ValueError, match="expected words, or a list of them"):
        read_observation({"state": np.zeros(4), "prompt": said}, SPEC)


def test_an_observation_of_no_env_is_refused() -> None:
    with pytest.raises(ValueError, match="of no env"):
        read_observation({"state": np.zeros((0, 4))}, SPEC)


def test_a_policy_that_fails_says_why_and_takes_the_next_observation(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = PolicyClient(f"ws://127.0.0.1:{port}", TOKEN)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("20 GiB are needed")

    with monkeypatch.context() as small:
        small.setattr(ServedPolicy, "infer", fail)
        with pytest.raises(RuntimeError, match=r"the policy failed: OutOfMemoryError\('20 GiB are needed'\)"):
            client.infer({"state": np.zeros(4)})
    assert client.infer({"state": np.zeros(4)})["actions"].shape == (3, 2)
    client.close()


@pytest.mark.parametrize(
    "bind", ["tcp://127.0.0.1:8056", "foo", ":8000", "127.0.0.1:http", "127.0.0.1:65536", "::1:80"]
)
def test_an_address_that_is_none_is_refused_in_the_words_of_the_help(checkpoint: Path, bind: str) -> None:
    told = CliRunner().invoke(app, ["serve-policy", str(checkpoint), "--bind", bind])
    assert told.exit_code == 2 and f"--bind = {bind}: expected HOST:PORT" in told.stderr, told.output
    assert "such as 127.0.0.1:8000" in told.stderr and "ipc://" not in told.stderr


def test_an_address_may_be_of_ipv6(checkpoint: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")

    class BoundError(Exception):
        pass

    def started(port: int) -> None:
        raise BoundError

    with pytest.raises(BoundError):
        asyncio.run(run_policy_server(ServedPolicy(checkpoint), "[::1]", 0, None, started))


def test_an_address_may_have_any_free_port(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    async def serve(*args: object) -> None:
        asked.extend(args[1:3])

    monkeypatch.setattr(policy_server, "run_policy_server", serve)
    assert CliRunner().invoke(app, ["serve-policy", str(checkpoint), "--bind", "127.0.0.1:*"]).exit_code == 0
    assert asked == ["127.0.0.1", 0]


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one() -> None:
    late = threading.Event()

    def talk(socket: websockets.sync.server.ServerConnection) -> None:
        socket.send(pack({}))
        with suppress(ConnectionClosed):
            for number in range(2):
                socket.recv()
                late.wait(60)
                socket.send(pack({"actions": number}))

    with websockets.sync.server.serve(talk, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = PolicyClient(f"ws://127.0.0.1:{server.socket.getsockname()[1]}")
        client._timeout_s = 1  # connecting may take longer
        with pytest.raises(TimeoutError):
            client.infer({})
        late.set()
        with pytest.raises(ConnectionClosed):
            client.infer({})
        server.shutdown()


def test_a_server_that_takes_nothing_in_is_waited_for_no_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def talk() -> None:
        connection, _ = listener.accept()
        with connection:
            request = connection.recv(2**16).decode()
            key = request.partition("Sec-WebSocket-Key: ")[2].partition("\r\n")[0]
            head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            accepted = f"{head}Sec-WebSocket-Accept: {accept_key(key)}\r\n\r\n".encode()
            connection.sendall(accepted + b"\x82\x01" + pack({}))
            over.wait(60)

    def connect_however_long_it_takes(address: str, **options: Any) -> websockets.sync.client.ClientConnection:
        return websockets.sync.client.connect(address, **{**options, "open_timeout": 60})

    monkeypatch.setattr(policy_client, "connect", connect_however_long_it_takes)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=talk)
        thread.start()
        client = PolicyClient(f"ws://127.0.0.1:{listener.getsockname()[1]}", timeout_s=1)
        with pytest.raises(TimeoutError, match="took nothing in for 1 s"):
            client.infer({"image": np.zeros(2**26, np.uint8)})
        over.set()
        thread.join(20)


def test_messages_survive_the_way_and_the_client_needs_no_torch() -> None:
    message = {"a": np.arange(6, dtype=np.uint8).reshape(2, 3), "b": [np.float32(0.5), "x"], "c": None}
    back = unpack(pack(message))
    np.testing.assert_array_equal(back["a"], message["a"])
    assert back["b"] == [0.5, "x"] and back["c"] is None
    beyond = {b"__npgeneric__": True, b"data": 300, b"dtype": "|i1"}
    for wrong in (b"\xc1", msgpack.packb(beyond)):
        with pytest.raises(ValueError, match="no message"):
            unpack(wrong)
    program = "import sys, embodied_rl.policy_client; print([m for m in ('torch', 'ray', 'zmq') if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"
