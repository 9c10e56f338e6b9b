"""Messages that are none, forged ones and raw bytes, thrown at running env servers while trainers use them.

    python benchmarks/env_server_fuzz.py --messages 100000       # some minutes on one core

Most go to a server without a token: requests that hypothesis makes up, and mutations of real ones, in sessions of the
attackers' own; random msgpack values, random frames, requests said twice; and, on the bare connection, random bytes,
messages that break off, and frames that are too large. A server with a token hears those who have none or another, and
the recording of a real session. Trainers go on throughout: every hundred messages or so one runs a chunk. The exit code
is 1 if a server ends, lets somebody in, or grows, or a trainer's chunk is not executed.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import struct
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import hypothesis
import msgpack
import numpy as np
import psutil
import typer
import zmq
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from env_server import EMPTY  # noqa: E402

from envs import wire  # noqa: E402
from envs.base import EnvSettings  # noqa: E402
from envs.client import RemotePool  # noqa: E402
from envs.launch import ServerProcess  # noqa: E402

OPS = ("open", "make", "reset", "step", "state", "restore", "drop", "ping", "alive", "", "eval")
SETTINGS = EnvSettings(EMPTY, "Empty")
BURST = 100
ROUNDS = 10
EXAMPLE = 10  # requests that hypothesis makes up at a time, which spares most of its own work
SHARES = {
    "requests of hypothesis": 0.1,
    "requests, mutated": 0.5,
    "random values": 0.16,
    "random frames": 0.2,
    "requests said twice": 0.02,
    "bytes on the bare connection": 0.01,
    "messages that break off": 0.006,
    "frames too large": 0.002,
    "another token or none": 0.001,
    "recorded sessions": 0.001,
}
GROWTH = 10.0  # MiB that memory may differ by
REAL: dict[str, Any] = {
    "settings": wire.plain_settings(SETTINGS),
    "env_ids": [0, 1],
    "chunk": 1,
    "set": 1,
    "numbers": np.zeros(2, np.int64),
    "lost": np.zeros(2, bool),
    "seed": 0,
    "group_size": 1,
    "auto_reset": True,
    "record_actions": False,
    "rows": [0],
    "seeds": None,
    "init_state_ids": None,
    "actions": np.zeros((2, 1, 7), np.float32),
    "kind": EMPTY,
    "id": "Empty",
    "processes": 1,
    "awaiting": [1],
    "state": [],
    "episodes": [],
}
HOSTILE = (b"\x91" * 1000 + b"\1", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\1", b"\xc1")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
ARRAYS = st.builds(np.zeros, st.integers(0, 3), st.sampled_from([np.float32, np.int64, np.bool_]))
EXTENSIONS = st.builds(msgpack.ExtType, st.integers(0, 3), st.binary(max_size=20))
CHANGES = st.dictionaries(st.sampled_from(list(REAL)), st.one_of(VALUES, VALUES, ARRAYS, EXTENSIONS), max_size=3)
HEADS = st.dictionaries(st.sampled_from(["number", "session", "op", "protocol"]), VALUES, max_size=2)
EXTRA = st.lists(st.binary(max_size=64), max_size=2)
REQUESTS = st.tuples(st.sampled_from(OPS), CHANGES, st.one_of(*[st.just({})] * 4, HEADS), EXTRA)


class Attacker:
    """Says things that a server should not have to hear, in a session of its own."""

    def __init__(self, address: str, seed: int) -> None:
        self.random, self.address = random.Random(seed), address
        self.counts: Counter[str] = Counter()
        self.session, self.number, self.last = secrets.token_bytes(16), 0, [b""]
        self.dealer: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.connect(address)

    def send(self, frames: list[Any]) -> None:
        self.counts["sent"] += 1
        self.last = frames
        self.dealer.send_multipart(frames)

    def head(self, op: str) -> dict[str, Any]:
        self.number += 1
        return {"protocol": wire.PROTOCOL, "session": self.session, "op": op, "number": self.number}

    def begin(self) -> None:
        """A new session, with envs in it, so that what follows gets far."""
        kept = Counter(self.counts)
        self.end()
        self.session, self.number = secrets.token_bytes(16), 0
        for op in ("open", "make", "reset"):
            self.dealer.send_multipart(wire.pack({**REAL, **self.head(op)}))
        self.settle()
        self.counts = kept

    def end(self) -> None:
        """Leave, wherever the session's numbers have got to."""
        for number in (self.head("close")["number"], 2**64 - 1):
            self.dealer.send_multipart(wire.pack({**self.head("close"), "number": number}))

    def settle(self) -> bool:
        """Wait until the server has done what it was asked, and count its answers. Raises TimeoutError.

        Returns:
            Whether the session is still heard: it may have ended, or its numbers been led astray.
        """
        self.number += 900  # past the small numbers that are made up
        number, probe = self.head("state")["number"], secrets.token_bytes(16)
        question = {"protocol": wire.PROTOCOL, "op": "state", "number": number, "set": -1}
        for session in (self.session, probe):
            self.dealer.send_multipart(wire.pack({**question, "session": session}))
        awaited: set[Any] = {number, probe}
        last: Any = None
        while awaited:
            if not self.dealer.poll(30_000 if probe in awaited else 1000):
                if probe in awaited:
                    raise TimeoutError("the server does not answer")
                return False
            message = wire.unpack(self.dealer.recv_multipart())
            about = message.get("gone", message.get("reply"))
            if isinstance(about, int | bytes) and about in awaited:
                awaited.remove(about)
                if about == probe and last == self.session and number in awaited:  # that was the question's answer
                    awaited.remove(number)
                    self.counts["refused"] -= 1
            else:
                self.counts["refused" if {"gone", "error"} & set(message) else "answered"] += 1
            last = about if isinstance(about, bytes) else None
        return True

    # ------------------------------------------------------------------------------------------ kinds

    def mutated(self) -> list[Any]:
        fields = dict(REAL)
        for _ in range(self.few()):
            array = np.zeros(self.few(), self.random.choice((np.float32, np.int64)))
            fields[self.random.choice(list(REAL))] = self.value() if self.random.random() < 0.8 else array
        op = self.random.choice(OPS) if self.random.random() < 0.99 else self.random.choice(("render", "close"))
        message = {**fields, **self.head(op)}
        if self.random.random() < 0.2:
            message[self.random.choice(("protocol", "session", "op", "number"))] = self.value()
        if self.random.random() < 0.1:
            message.pop(name := self.random.choice(list(message)))
            packed = wire.pack(message)[0]  # a map of 16 to 65535 items: a byte, two of their number, the items
            more = struct.pack(">H", len(message) + 1)
            return [packed[:1] + more + packed[3:] + msgpack.packb(name) + self.random.choice(HOSTILE)]
        frames = [bytearray(bytes(frame)) for frame in wire.pack(message)]
        for _ in range(self.random.choice((0, 0, 1, 3))):  # some bytes of it are others
            frames[0][self.random.randrange(len(frames[0]))] = self.random.randrange(256)
        return frames

    def values(self) -> list[Any]:
        return [msgpack.packb(self.value()), *(b"x" * self.few() for _ in range(self.few()))]

    def frames(self) -> list[Any]:
        count = 70 if self.random.random() < 0.01 else self.few() + 1
        return [self.random.randbytes(self.random.randrange(300)) for _ in range(count)]

    def twice(self) -> list[Any]:
        return wire.pack({**REAL, **self.head("step")}) if self.counts["sent"] % 2 == 0 else self.last

    def value(self, depth: int = 0) -> Any:
        kind = self.random.randrange(10 if depth < 4 else 8)
        if kind == 8:
            return [self.value(depth + 1) for _ in range(self.few())]
        if kind == 9:
            return {str(self.random.randrange(9)): self.value(depth + 1) for _ in range(self.few())}
        numbers = self.random.randrange(-(2**63), 2**64), self.random.choice((-1, 0, 2**31, 10**9))
        extension = msgpack.ExtType(self.random.randrange(4), self.random.randbytes(self.few() * 5))
        texts = "é" * self.few(), b"\0" * 16
        return (None, True, *numbers, self.random.choice((0.5, float("nan"))), *texts, extension)[kind]

    def few(self) -> int:
        return self.random.randrange(4)

    # ------------------------------------------------------------------------------------------ bare connections

    def bare(self, *parts: bytes) -> socket.socket:
        """A connection of our own making on which these bytes are said."""
        self.counts["sent"] += 1
        connection = socket.create_connection(("127.0.0.1", int(self.address.rpartition(":")[2])), 10)
        with suppress(ConnectionError):  # the server may end it in the middle
            connection.sendall(b"".join(parts))
        return connection

    def noise(self) -> None:
        self.bare(self.random.randbytes(self.random.choice((1, 10, 64, 500, 5000)))).close()

    def broken_off(self) -> None:
        whole = zmtp(bytes(wire.pack(self.head("state"))[0]), True) + zmtp(b"x" * 40)
        self.bare(GREETING, whole[: self.random.randrange(1, len(whole))]).close()

    def oversized(self) -> None:
        """Half of them say so only; after either the server ends the connection."""
        size = wire.MAX_REQUEST + 1 if self.random.random() < 0.5 else 2 ** self.random.randrange(25, 63)
        body = bytes(size) if size == wire.MAX_REQUEST + 1 else b"x"
        with self.bare(GREETING, b"\2" + struct.pack(">Q", size), body) as connection:
            connection.settimeout(10)
            with suppress(ConnectionError):
                while connection.recv(4096):
                    pass


GREETING = b"\xff" + bytes(8) + b"\x7f\3\0NULL" + bytes(48)  # of ZMTP 3.0 (RFC 23), without security
GREETING += b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER"


def zmtp(frame: bytes, more: bool = False) -> bytes:
    """A frame as it goes over the wire."""
    if len(frame) < 256:
        return bytes([more, len(frame)]) + frame
    return bytes([2 + more]) + struct.pack(">Q", len(frame)) + frame


class Victim:
    """A running server and a trainer that uses it."""

    def __init__(self, log: Path, token: bytes | None = None) -> None:
        options = ["--processes", "1", "--max-envs", "16", "--metrics-port", "0"]
        if token is not None:
            file = log.with_suffix(".token")
            file.write_bytes(token)
            options += ["--token-file", str(file)]
        stderr = os.dup(2)
        with log.open("wb") as said:  # each request that fails leaves a traceback
            os.dup2(said.fileno(), 2)
            try:
                self.server = ServerProcess([EMPTY, "Empty", *options])
            finally:
                os.dup2(stderr, 2)
        self.address, self._metrics = self.server.address, self.server.said[0].split()[-1]
        self.process, self.sizes, self.descriptors = psutil.Process(self.server.popen.pid), [0.0], [0]
        self.trainer = RemotePool(self.address, EMPTY, "Empty", timeout_s=30, token=token)
        with patch("envs.remote.map_shared", lambda *_: None):  # else its chunks would not need the server
            self.env = self.trainer.vector_env(SETTINGS, [0, 1])
        self.env.reset()
        self.slowest = 0.0

    def metrics(self) -> dict[str, float]:
        text = urllib.request.urlopen(self._metrics, timeout=30).read().decode()
        values = dict(line.split() for line in text.splitlines())
        return {name.removeprefix("env_server_").removesuffix("_total"): float(x) for name, x in values.items()}

    def train(self) -> None:
        """A chunk. Raises EnvError if the server does not answer, and RuntimeError if it was not executed."""
        start = time.monotonic()
        if not self.env.chunk_step(np.zeros((2, 1, 7), np.float32)).valid.all():
            raise RuntimeError("a chunk of the trainer was not executed")
        self.slowest = max(self.slowest, time.monotonic() - start)

    def weigh(self) -> None:
        self.sizes.append(self.process.memory_info().rss / 2**20)
        self.descriptors.append(self.process.num_fds())

    def verdict(self) -> list[str]:
        """What is wrong, once all is over. The first fifth is for what is made once."""
        settled = len(self.sizes) // 5
        found = [] if self.server.popen.poll() is None else [f"the server ended: {self.server.popen.returncode}"]
        if self.trainer.lost_episodes:
            found.append(f"the trainer lost {self.trainer.lost_episodes} episodes")
        if self.sizes[-1] > max(self.sizes[: settled + 1]) + GROWTH:
            found.append(f"memory grew from {self.sizes[settled]:.0f} to {self.sizes[-1]:.0f} MiB")
        if self.descriptors[-1] > max(self.descriptors[: settled + 1]) + 10:
            found.append(f"descriptors grew from {self.descriptors[settled]} to {self.descriptors[-1]}")
        return found


def strike_with_hypothesis(attacker: Attacker, count: int, seed: int, settle: Callable[[], None]) -> None:
    """About as many requests that hypothesis makes up."""

    @hypothesis.settings(
        max_examples=max(1, count // EXAMPLE),
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.seed(seed)
    @hypothesis.given(st.lists(REQUESTS, min_size=EXAMPLE, max_size=EXAMPLE))
    def strike(requests: list[tuple[str, dict[str, Any], dict[str, Any], list[bytes]]]) -> None:
        for op, changes, head, extra in requests:
            attacker.send([*wire.pack({**REAL, **changes, **attacker.head(op), **head}), *extra])
        if attacker.counts["sent"] % BURST == 0:
            settle()

    strike()


def strangers(attacker: Attacker, token: bytes, count: int) -> list[str]:
    """As many clients that must not get in, and one that may; what is wrong."""
    server_key, own = wire.curve_keys(token, "server")[0], wire.curve_keys(token, "client")
    keys: list[tuple[bytes, tuple[bytes, bytes]] | None] = [(server_key, own)]
    wrong = secrets.token_bytes(32)
    forged = (wire.curve_keys(wrong, "server")[0], wire.curve_keys(wrong, "client"))
    for number in range(count):
        keys.append((None, forged, (server_key, zmq.curve_keypair()))[number % 3])
    sockets: list[zmq.Socket] = []
    for key in keys:
        dealer: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        if key is not None:
            dealer.curve_serverkey, (dealer.curve_publickey, dealer.curve_secretkey) = key
        dealer.connect(attacker.address)
        dealer.send_multipart(wire.pack(attacker.head("state")))
        sockets.append(dealer)
    may, *must_not = sockets
    found = [] if may.poll(30_000) else ["who has the token was not let in"]
    time.sleep(0.2)
    if any(dealer.poll(0) for dealer in must_not):
        found.append("somebody without the token was answered")
    attacker.counts["sent"] += count
    for dealer in sockets:
        dealer.close()
    return found


def record(address: str, token: bytes) -> bytes:
    """What a trainer says to a server with a token, as it goes over the wire."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def tap() -> None:
            caller, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))

            def pass_on(source: socket.socket, to: socket.socket) -> None:
                with suppress(OSError):
                    while data := source.recv(65536):
                        if source is caller:
                            heard.extend(data)
                        to.sendall(data)

            threading.Thread(target=pass_on, args=(server, caller), daemon=True).start()
            pass_on(caller, server)

        threading.Thread(target=tap, daemon=True).start()
        pool = RemotePool(f"tcp://127.0.0.1:{listener.getsockname()[1]}", EMPTY, "Empty", token=token)
        pool.vector_env(SETTINGS, [0]).reset()
        pool.close()
    return bytes(heard)


def main(
    messages: Annotated[int, typer.Option(help="how many")] = 100_000,
    seed: Annotated[int, typer.Option(help="of what is random")] = 0,
) -> None:
    """Throw messages at servers, and say how they bore them."""
    os.chdir(HERE)  # where servers find `Empty`
    folder, token, console = Path(tempfile.mkdtemp()), secrets.token_hex(16).encode(), Console(width=140)
    open_one, guarded = Victim(folder / "open.log"), Victim(folder / "guarded.log", token)
    recording, start, problems = record(guarded.address, token), time.monotonic(), []
    attackers = {
        kind: Attacker((guarded if kind in list(SHARES)[-2:] else open_one).address, seed + number)
        for number, kind in enumerate(SHARES)
    }
    makers = {"requests, mutated": Attacker.mutated, "random values": Attacker.values}
    makers |= {"random frames": Attacker.frames, "requests said twice": Attacker.twice}
    bare = {"bytes on the bare connection": Attacker.noise, "messages that break off": Attacker.broken_off}
    bare |= {"frames too large": Attacker.oversized}

    def settle(attacker: Attacker) -> None:
        if not attacker.settle():
            attacker.begin()
        open_one.train()

    try:
        for number in range(ROUNDS):
            for kind, share in SHARES.items():
                attacker = attackers[kind]
                count = int(messages * share * (number + 1) / ROUNDS) - int(messages * share * number / ROUNDS)
                if kind.startswith("requests"):
                    attacker.begin()
                if kind == "requests of hypothesis":
                    strike_with_hypothesis(attacker, count, seed * ROUNDS + number, lambda who=attacker: settle(who))
                elif kind == "another token or none":
                    problems += strangers(attacker, token, count)
                elif kind == "recorded sessions":
                    before = guarded.metrics()["messages"]
                    for _ in range(count):
                        attacker.bare(recording).close()
                    guarded.train()
                    if (heard := guarded.metrics()["messages"] - before) > 3:  # the chunk's, and signs of life
                        problems.append(f"{heard:.0f} messages of a recorded session were heard")
                else:
                    for struck in range(1, count + 1):
                        if kind in bare:
                            bare[kind](attacker)
                        else:
                            attacker.send(makers[kind](attacker))
                        if struck % BURST == 0 or struck == count:
                            settle(attacker)
            for victim in (open_one, guarded):
                victim.train()
                victim.weigh()
            sent, size = sum(attacker.counts["sent"] for attacker in attackers.values()), open_one.sizes[-1]
            about = f"{number + 1}/{ROUNDS} rounds, {time.monotonic() - start:.0f} s: {sent} messages, {size:.1f} MiB"
            console.print(about, highlight=False)
    except KeyboardInterrupt:
        problems.append("stopped before all was said")
    except Exception as error:  # whatever it is, it is what was looked for
        problems.append(repr(error))
    for victim in (open_one, guarded):
        problems += victim.verdict()
    table = Table(title="what was said, and what came of it")
    for column in ("kind", "sent", "answered", "refused", "not answered"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind, attacker in attackers.items():
        sent, answered, refused = (attacker.counts[name] for name in ("sent", "answered", "refused"))
        table.add_row(kind, *map(str, (sent, answered, refused, sent - answered - refused)))
    console.print(table)
    names = (
        "messages",
        "malformed",
        "refused",
        "replayed",
        "admitted",
        "not_admitted",
        "handshakes_failed",
        "sessions",
    )
    for name, victim in (("the open server", open_one), ("the one with a token", guarded)):
        if victim.server.popen.poll() is None:
            metrics = victim.metrics()
            console.print(f"{name} counted", ", ".join(f"{metrics[key]:.0f} {key}" for key in names), highlight=False)
        console.print("  MiB:", " ".join(f"{size:.1f}" for size in victim.sizes[1:]), highlight=False)
        console.print("  descriptors:", " ".join(map(str, victim.descriptors[1:])), highlight=False)
        console.print(f"  the trainer's slowest chunk: {victim.slowest:.2f} s", highlight=False)
    for attacker in attackers.values():
        attacker.end()
    for victim in (open_one, guarded):
        victim.trainer.close()
        if (code := victim.server.close(60.0)) != 0:  # sessions that did not hear their end go on for --drain seconds
            problems.append(f"a server's exit code, when it was asked to end, was {code}")
    for problem in problems:
        console.print(f"WRONG: {problem} (what the servers said is in {folder})", highlight=False)
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
