"""Messages that are none, forged ones and raw bytes, thrown at a running env server while a trainer uses it.

    python benchmarks/env_server_fuzz.py --messages 100000

The server has to answer the trainer throughout and to stay as large as it was. Messages are mutations of real requests
(in a session of the attacker's own too), random msgpack values, random frames, and random bytes on the bare connection.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgpack
import numpy as np
import psutil
import typer
import zmq

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from env_server import EMPTY  # noqa: E402

from envs import wire  # noqa: E402
from envs.base import EnvSettings  # noqa: E402
from envs.client import RemotePool  # noqa: E402
from envs.launch import ServerProcess  # noqa: E402

OPS = ("open", "make", "reset", "step", "state", "restore", "drop", "render", "ping", "alive", "close", "", "eval")
SETTINGS = EnvSettings(EMPTY, "Empty")


class Attacker:
    """Says things that a server should not have to hear."""

    def __init__(self, address: str, seed: int) -> None:
        self.random, self.port = random.Random(seed), int(address.rpartition(":")[2])
        self.dealer: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.connect(address)
        self.session, self.number = secrets.token_bytes(16), 0

    def strike(self) -> None:
        kind = self.random.random()
        if kind < 0.02:
            with socket.create_connection(("127.0.0.1", self.port), 10) as bare:
                bare.sendall(self.random.randbytes(self.random.choice((1, 10, 64, 500, 5000))))
            return
        if kind < 0.2:
            self.dealer.send_multipart(
                [self.random.randbytes(self.random.randrange(300)) for _ in range(self.few() + 1)]
            )
        elif kind < 0.4:
            self.dealer.send_multipart([msgpack.packb(self.value()), *(b"x" * self.few() for _ in range(self.few()))])
        else:
            frames = [bytearray(bytes(frame)) for frame in wire.pack(self.request())]
            if kind < 0.7:  # some bytes of it are others
                for _ in range(self.few()):
                    frames[0][self.random.randrange(len(frames[0]))] = self.random.randrange(256)
            self.dealer.send_multipart(frames)
        while self.dealer.poll(0):
            self.dealer.recv_multipart()

    def request(self) -> dict[str, Any]:
        self.number += 1
        real = {
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
            "awaiting": [self.number],
            "state": [],
            "episodes": [],
        }
        for _ in range(self.few()):
            array = np.zeros(self.few(), self.random.choice((np.float32, np.int64)))
            real[self.random.choice(list(real))] = self.value() if self.random.random() < 0.8 else array
        op = self.random.choice(OPS)
        if op == "close" and self.random.random() < 0.9:
            op = "step"
        head = {"protocol": wire.PROTOCOL, "session": self.session, "op": op, "number": self.number}
        if self.random.random() < 0.2:
            head[self.random.choice(list(head))] = self.value()
        return {**real, **head}

    def value(self, depth: int = 0) -> Any:
        choices = [
            None,
            True,
            self.random.randrange(-(2**63), 2**64),
            self.random.random(),
            "é" * self.few(),
            b"\0" * 16,
        ]
        choices += [float("nan"), 2**31, -1]
        if depth < 4:
            choices.append([self.value(depth + 1) for _ in range(self.few())])
            choices.append({str(self.random.randrange(9)): self.value(depth + 1) for _ in range(self.few())})
        return self.random.choice(choices)

    def few(self) -> int:
        return self.random.randrange(4)


def main(
    messages: Annotated[int, typer.Option(help="how many")] = 100_000, seed: Annotated[int, typer.Option()] = 0
) -> None:
    """Throw messages at a server, and say how it bore them."""
    os.chdir(HERE)
    server = ServerProcess([EMPTY, "Empty", "--processes", "1", "--session-timeout", "5", "--metrics-port", "0"])
    trainer = RemotePool(server.address, EMPTY, "Empty", timeout_s=15)
    env = trainer.vector_env(SETTINGS, [0, 1])
    env.reset()
    actions = np.zeros((2, 1, 7), np.float32)
    attacker, process = Attacker(server.address, seed), psutil.Process(server.popen.pid)
    sizes, worst, start = [], 0.0, time.monotonic()
    for number in range(messages):
        attacker.strike()
        if number % 100 == 0:
            before = time.monotonic()
            assert env.chunk_step(actions).valid.all(), "the trainer's chunk was not executed"
            worst = max(worst, time.monotonic() - before)
        if number % max(1, messages // 10) == 0:
            sizes.append(process.memory_info().rss / 2**20)
            attacker.session, attacker.number = secrets.token_bytes(16), 0
    sizes.append(process.memory_info().rss / 2**20)
    print(f"{messages} messages in {time.monotonic() - start:.0f} s; longest chunk step of the trainer {worst:.2f} s")
    print("resident memory, MiB:", " ".join(f"{size:.0f}" for size in sizes))
    state = f"alive: {server.popen.poll() is None}"
    trainer.close()
    print(f"{state}; lost episodes: {trainer.lost_episodes}; exit code when asked to end: {server.close()}")


if __name__ == "__main__":
    typer.run(main)
