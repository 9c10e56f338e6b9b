"""Env servers and what is no message, or is one in the wrong way."""

import itertools
import os
import signal
import socket
import threading
from collections.abc import Iterator

import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from served import TOY, Start, actions, connect, wait_until

from envs import session, wire
from envs.base import EnvError
from envs.client import RemotePool
from envs.server import EnvServer
from envs.session import Limits

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    ["open", "make", "reset", "step", "state", "restore", "drop", "render", "ping", "close", "alive"]
)
FIELDS = ["set", "settings", "env_ids", "chunk", "rows", "seeds", "init_state_ids", "actions", "state", "shared"]
FIELDS += ["rung", "awaiting", "kind", "id", "processes", "numbers", "lost", "episodes"]


def pids_of(server: EnvServer, pool: RemotePool) -> list[int]:
    """The env processes of this session alone: those of earlier tests may still be ending."""
    owner = server.sessions[pool._key].pool
    assert owner is not None
    return owner.pids


@pytest.fixture(scope="module")
def victim(server: EnvServer) -> Iterator[RemotePool]:
    """A session that messages are forged in; its set has a number that is hard to guess."""
    pool = connect(server)
    pool._set_numbers = itertools.count(77_777)
    pool.vector_env(TOY, range(2)).reset()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def dealer(server: EnvServer) -> Iterator[zmq.Socket]:
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(server.address)
        yield dealer


def is_answered(dealer: zmq.Socket, session: bytes) -> bool:
    """Whether the server has survived what was sent before: it says that it knows no such session. What comes first are
    answers to earlier requests."""
    dealer.send_multipart(wire.pack({"protocol": wire.PROTOCOL, "session": session, "op": "state", "number": 1}))
    while dealer.poll(60_000):
        if wire.unpack(dealer.recv_multipart()).get("gone") == session:
            return True
    return False


@settings(max_examples=100, deadline=None)
@given(
    op=NAMES | st.text(max_size=5),
    number=st.just("next") | VALUES,
    stolen=st.booleans(),
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
    extra=st.lists(st.binary(max_size=64), max_size=3),
)
def test_no_message_harms_the_server_nor_the_session_it_is_forged_in(
    victim: RemotePool, dealer: zmq.Socket, op: str, number: object, stolen: bool, fields: dict, extra: list[bytes]
) -> None:
    key = victim._key if stolen and op != "close" else bytes(16)
    number = next(victim._numbers) if number == "next" else number
    try:
        frames = wire.pack({"protocol": wire.PROTOCOL, "session": key, "op": op, "number": number, **fields})
    except OverflowError:
        frames = [b""]
    dealer.send_multipart([*frames, *extra])
    assert is_answered(dealer, b"?" * 16)
    env = victim.sets[77_777]
    assert env.chunk_step(actions(env, 1)).valid.all()


@settings(max_examples=200, deadline=None)
@given(frames=st.lists(st.binary(max_size=200), max_size=5))
def test_whatever_bytes_come_a_message_is_refused_by_one_error(frames: list[bytes]) -> None:
    try:
        message = wire.unpack(frames)
    except wire.WireError:
        return
    assert isinstance(message, dict)


def test_requests_that_are_wrong_in_ways_of_their_own_end_no_server(server: EnvServer) -> None:
    pool = connect(server)
    env = pool.vector_env(TOY, range(2))
    env.reset()
    for op, fields in (
        ("reset", {"set": [1], "rows": [0], "seeds": None, "init_state_ids": None}),
        ("make", {**env.description(), "set": 9, "numbers": [2**64 - 1, 0]}),
    ):
        pool.send(op, **fields)
    deep = b"\x91" * 1000 + b"\x01"  # lists in lists
    parts = {"session": bytes(16), "op": "open", "number": 1}
    pool._socket.send(b"\x84" + msgpack.packb("protocol") + deep + msgpack.packb(parts)[1:])
    for number in ("first", 2**40):
        pool._say({"op": "open", "session": bytes(15) + b"!", "number": number})
    assert env.chunk_step(actions(env, 1)).valid.all()
    assert bytes(15) + b"!" not in server.sessions
    pool.close()


def test_requests_that_wait_have_bounded_sizes_and_those_refused_are_asked_again(
    server: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.server.MAX_QUEUED_BYTES", 2**17)
    pool = connect(server)
    env = pool.vector_env(TOY, range(1))
    env.reset()
    processes = pids_of(server, pool)
    refused = server.counts["refused"]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    requests = [pool.send("state", set=env.key, more=bytes(2**16 - 100)) for _ in range(5)]  # the first is begun
    wait_until(lambda: server.counts["refused"] > refused)
    assert 0 < sum(size for _, _, size in server.sessions[pool._key].queue) <= 2**17
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
    assert all(len(pool.wait(request)["value"]) == 1 for request in requests)
    pool.close()


def test_envs_may_be_dropped_while_a_chunk_of_theirs_is_run(server: EnvServer) -> None:
    pool = connect(server)
    env, other = pool.vector_env(TOY, range(2)), pool.vector_env(TOY, range(2))
    env.reset()
    other.reset()
    processes = pids_of(server, pool)
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    env.chunk_step_async(actions(env, 1))
    other.chunk_step_async(actions(other, 1))
    env.close()
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
    assert other.chunk_step_wait().valid.all()
    with pytest.raises(EnvError, match="dropped"):
        env.chunk_step_wait()
    pool.close()


def test_raw_bytes_and_oversized_frames_end_only_their_own_connection(server: EnvServer, dealer: zmq.Socket) -> None:
    pool = connect(server)
    env = pool.vector_env(TOY, range(1))
    env.reset()
    port = int(server.address.rpartition(":")[2])
    rng = np.random.default_rng(0)
    for size in (1, 10, 64, 1000, 100_000):
        with socket.create_connection(("127.0.0.1", port), 5) as guest:
            guest.sendall(rng.bytes(size))
    malformed = server.counts["malformed"]
    dealer.send(bytes(wire.MAX_REQUEST + 1))  # the connection ends
    dealer.send(b"no message")
    assert is_answered(dealer, b"raw bytes, large")
    assert server.counts["malformed"] > malformed
    assert env.chunk_step(actions(env, 1)).valid.all()
    pool.close()


def test_arrays_that_are_not_what_they_say_are_refused() -> None:
    frames = [bytes(frame) for frame in wire.pack({"a": np.zeros(40_000, np.float32)})]
    assert len(frames) == 2 and wire.unpack(frames)["a"].shape == (40_000,)
    with pytest.raises(wire.WireError, match="159999 bytes"):
        wire.unpack([frames[0], frames[1][:-1]])
    with pytest.raises(wire.WireError):
        wire.unpack([frames[0]])
    for dtype, shape, data in (("|O", [1], bytes(8)), ("<f4", [-1, -1], bytes(4)), ("<f4", [2**62, 4], b"")):
        forged = msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb((dtype, shape, data)))})
        with pytest.raises(wire.WireError):
            wire.unpack([forged])


def test_more_envs_than_a_message_lists_are_refused_and_not_asked_for_without_end(server: EnvServer) -> None:
    pool = connect(server)
    said: list[str] = []

    def ask() -> None:
        with pytest.raises(EnvError) as refusal:
            pool.vector_env(TOY, range(wire.MAX_LIST + 1))
        said.append(str(refusal.value))

    threading.Thread(target=ask, daemon=True).start()
    wait_until(lambda: bool(said))
    assert "65537 envs in one session; the server takes up to 1024" in said[0]
    pool.close()
    with pytest.raises(ValueError, match="max_envs is 65537; messages are of 65536 envs at most"):
        Limits(max_envs=wire.MAX_LIST + 1)
    for array in (np.zeros(2, np.float16), np.zeros(2, np.int32), np.zeros(2, ">f4"), np.zeros(2, object)):
        with pytest.raises(TypeError, match=f"an array of {array.dtype} does not go over the wire"):
            wire.pack({"actions": array})


def test_what_is_too_large_for_the_other_end_is_said_and_not_sent(
    server: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {"films": [np.full(2**16 + 1, number % 256, np.uint8) for number in range(100)]}
    frames = wire.pack(many)
    assert len(frames) == wire.MAX_FRAMES
    for sent, received in zip(many["films"], wire.unpack(frames)["films"], strict=True):
        np.testing.assert_array_equal(sent, received)
    pool = connect(server)
    env = pool.vector_env(TOY, range(1))
    long = [{**slot, "actions": np.zeros((2**21 + 1, 2), np.float32)} for slot in env.state()]
    with pytest.raises(EnvError, match=r"the request to restore has 16777224 bytes .* 16777216 at most"):
        env.restore(long)
    assert env.reset().keys() == {"state", "image", "instruction"}
    with monkeypatch.context() as small:
        small.setattr(wire, "MAX_FRAME", 50)
        with pytest.raises(EnvError, match="the answer has .* a trainer takes 50 at most"):
            env.state()
    pool.close()


def test_an_answer_that_cannot_be_sent_ends_no_server(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    pool = connect(server)
    with monkeypatch.context() as odd:
        odd.setattr(session, "versions", lambda: {"python": {3, 11}})
        with pytest.raises(EnvError, match="set does not go over the wire"):
            connect(server)
    assert pool.vector_env(TOY, range(1)).reset()
    pool.close()
