"""Chunk steps through an env server, against the env pool in the same process: one table.

    python benchmarks/env_server.py                                       # everything, in one run
    python benchmarks/env_server.py --env PushCube-v1 --batches 2,8       # a part of it
    python benchmarks/env_server.py --env StackCube-v1+pictures --batches 64 --chunks 8

Contestants: the pool in this process; a server on the same host by ipc, with shared memory; one by tcp on the loopback,
everything going over the wire; and a websocket server that speaks JSON, arrays as base64, as is common. All have as
many env processes. Those of a row are set up first, then measured in turn, round after round; printed are medians, and
the medians of each round's ratio to the pool. Pictures are 2 x 256 x 256: of StackCube-v1, whose robot has a camera at
its wrist, and of LIBERO. Needs an otherwise idle machine.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from websockets.sync.client import connect
from websockets.sync.server import serve

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from envs.base import ActionSpec, Env, EnvSettings, Step  # noqa: E402
from envs.client import RemotePool  # noqa: E402
from envs.launch import ServerProcess  # noqa: E402
from envs.libero_suites import SUITES  # noqa: E402
from envs.pool import EnvPool  # noqa: E402

EMPTY = "env_server:Empty"
ENVS = ["empty", "PushCube-v1", "StackCube-v1+pictures", "libero_object/0", "libero_object/0+pictures"]
WAYS = {
    "pool": "pool in process",
    "ipc": "ipc, shared memory",
    "tcp": "tcp, all on the wire",
    "json": "websocket and JSON",
}


class Empty(Env):
    """Does nothing, so that what remains is the way there and back."""

    action = ActionSpec((-1.0,) * 7, (1.0,) * 7)
    has_success = False
    horizon = 1000
    instruction = "wait"

    def __init__(self, settings: EnvSettings) -> None:
        whole = {"state": np.zeros(32, np.float32), "image": np.zeros((2, 256, 256, 3), np.uint8)}
        self._observation = {key: whole[key] for key in settings.observation}

    def reset(self, seed: int, init_state_id: int | None) -> None:
        pass

    def step(self, action: np.ndarray, observed: bool) -> Step:
        return Step(0.0, False, False, False)

    def observe(self) -> dict[str, np.ndarray]:
        return self._observation


def settings_of(word: str, mesh_detail: float) -> EnvSettings:
    """Of "ENV" or "ENV+pictures"."""
    env, _, pictures = word.partition("+")
    if pictures not in ("", "pictures"):
        raise typer.BadParameter(f"{word}: expected ENV or ENV+pictures")
    observation = ("state", "image") if pictures else ("state",)
    if env == "empty":
        return EnvSettings(EMPTY, "Empty", observation=observation)
    if env.partition("/")[0] in SUITES:
        return EnvSettings("libero", env, observation=observation, simulator={"image_size": 256})
    simulator = {"image_size": 256, "mesh_detail": mesh_detail} if pictures else {}
    return EnvSettings("maniskill", env, observation=observation, simulator=simulator)


class JsonServer:
    """A server process that makes vector envs and steps them on request, by a websocket that speaks JSON."""

    def __init__(self, word: str, mesh_detail: float, processes: int) -> None:
        options = ["--serve-json", "--env", word, "--mesh-detail", str(mesh_detail), "--processes", str(processes)]
        self._process = subprocess.Popen([sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        address = f"ws://127.0.0.1:{self._process.stdout.readline().strip()}"
        self._open = ExitStack()
        self._socket = self._open.enter_context(connect(address, max_size=None))

    def ask(self, **message: Any) -> dict[str, np.ndarray]:
        self._socket.send(json.dumps(message))
        return {key: of_json(value) for key, value in json.loads(self._socket.recv(timeout=600)).items()}

    def close(self) -> None:
        self._open.close()
        self._process.kill()
        self._process.wait()


class JsonEnv:
    """A vector env there."""

    def __init__(self, server: JsonServer, batch: int, chunk: int) -> None:
        self._server = server
        server.ask(batch=batch, chunk=chunk)

    def chunk_step(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        return self._server.ask(actions=as_json(actions))

    def close(self) -> None:
        self._server.ask()


def serve_json(settings: EnvSettings, processes: int) -> None:
    """The program of a `JsonServer`'s process."""
    pool = EnvPool(processes)

    def talk(socket: Any) -> None:
        vector: Any = None
        for message in map(json.loads, socket):
            arrays: dict[str, np.ndarray] = {}
            if "actions" in message:
                result = vector.chunk_step(of_json(message["actions"]))
                arrays = {name: getattr(result, name) for name in ("reward", "terminated", "truncated", "valid")}
                arrays |= {key: value for key, value in result.observation.items() if isinstance(value, np.ndarray)}
            elif "batch" in message:
                vector = pool.vector_env(settings, range(message["batch"]), message["chunk"])
                vector.reset()
            else:
                vector.close()
            socket.send(json.dumps({name: as_json(array) for name, array in arrays.items()}))

    with serve(talk, "127.0.0.1", 0, max_size=None) as server:
        print(server.socket.getsockname()[1], flush=True)
        server.serve_forever()


def as_json(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": array.shape, "data": base64.b64encode(array.tobytes()).decode()}


def of_json(value: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"])


class Contest:
    """The pool and the servers of one env, those of `ways`, and measurements of them."""

    def __init__(self, word: str, mesh_detail: float, processes: int, ways: list[str]) -> None:
        self.settings = settings = settings_of(word, mesh_detail)
        binds = {"ipc": f"ipc://{tempfile.mkdtemp()}/server", "tcp": "tcp://127.0.0.1:*"}
        self._servers = {
            way: ServerProcess([settings.kind, settings.id, "--bind", binds[way], "--processes", str(processes)])
            for way in ways
            if way in binds
        }
        self._pools: dict[str, Any] = {}
        for way in ways:
            if way in self._servers:
                address = self._servers[way].address
                self._pools[way] = RemotePool(address, settings.kind, settings.id, timeout_s=600)
            else:
                self._pools[way] = EnvPool(processes) if way == "pool" else JsonServer(word, mesh_detail, processes)

    @contextmanager
    def vectors(self, batch: int, chunk: int) -> Iterator[list[Any]]:
        """Of each contestant one, begun."""
        vectors = []
        for way, pool in self._pools.items():
            if way == "json":
                vectors.append(JsonEnv(pool, batch, chunk))
                continue
            with patch("envs.remote.map_shared", lambda *_: None) if way == "tcp" else nullcontext():
                vectors.append(pool.vector_env(self.settings, range(batch), chunk))
            assert getattr(vectors[-1], "is_shared", way == "pool") == (way != "tcp")
            vectors[-1].reset()
        yield vectors
        for vector in vectors:
            vector.close()

    def row(self, batch: int, chunk: int, rounds: int, seconds: float) -> list[str]:
        """Milliseconds of a chunk step and the ratio to the pool, of each contestant."""
        with self.vectors(batch, chunk) as vectors:
            actions = np.zeros(vectors[0].buffers.action.shape, np.float32)
            for vector in vectors:
                measure(vector, actions, seconds)
            found = [[measure(vector, actions, seconds) for vector in vectors] for _ in range(rounds)]
        medians = [1000 * statistics.median(times) for times in zip(*found, strict=True)]
        ratios = [statistics.median(times[0] / times[i] for times in found) for i in range(len(medians))]
        return [f"{ms:.2f}  ({ratio:.2f})" for ms, ratio in zip(medians, ratios, strict=True)]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        for server in self._servers.values():
            server.close()


def measure(env: Any, actions: np.ndarray, seconds: float) -> float:
    """Seconds of one chunk step."""
    steps, start, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < seconds or not steps:
        env.chunk_step(actions)
        steps += 1
        elapsed = time.perf_counter() - start
    return elapsed / steps


def batches_of(word: str, given: str) -> list[int]:
    """64 envs of LIBERO take minutes to make, four times over."""
    return numbers(given or ("1,8" if word.partition("/")[0] in SUITES else "1,8,64"))


def ways_of(word: str, batch: int, given: str) -> tuple[str, ...]:
    """Eight envs of LIBERO take 5 GB, which few machines have four times over."""
    few = word.partition("/")[0] in SUITES and batch > 2
    return tuple((given or ("pool,ipc" if few else ",".join(WAYS))).split(","))


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main(
    env: Annotated[
        list[str], typer.Option(help="empty, an id of ManiSkill or LIBERO tasks; with +pictures for 2 x 256 x 256 RGB")
    ] = ENVS,  # noqa: B006
    batches: Annotated[str, typer.Option(help="numbers of envs; default: 1,8,64, of LIBERO 1,8")] = "",
    chunks: Annotated[str, typer.Option(help="actions in a chunk")] = "1,8",
    processes: Annotated[int, typer.Option(help="env processes of each contestant")] = 2,
    ways: Annotated[
        str, typer.Option(help="contestants, the pool first; default: all, of many LIBERO envs pool,ipc")
    ] = "",
    rounds: Annotated[int, typer.Option(help="measurements of each contestant")] = 5,
    seconds: Annotated[float, typer.Option(help="of one measurement, at least one chunk")] = 0.3,
    mesh_detail: Annotated[float, typer.Option(help="of ManiSkill's pictures, in metres (env.mesh_detail)")] = 0.01,
    serve: Annotated[bool, typer.Option("--serve-json", hidden=True)] = False,
) -> None:
    """Compare the pool with env servers, and those with a server as others write it."""
    if serve:
        return serve_json(settings_of(env[0], mesh_detail), processes)
    os.chdir(HERE)  # where servers find `Empty`
    start, console = time.monotonic(), Console(width=140)
    rows = [(word, batch, chunk) for word in env for batch in batches_of(word, batches) for chunk in numbers(chunks)]
    table = Table(title="milliseconds of a chunk step (and throughput, the pool's being 1)")
    contestants = ways.split(",") if ways else list(WAYS)
    if contestants[0] != "pool" or not set(contestants) <= WAYS.keys():
        raise typer.BadParameter(f"--ways {ways}: expected pool, and any of {', '.join(WAYS)} after it")
    for column in ("env", "envs", "chunk", *(WAYS[way] for way in contestants)):
        table.add_column(column, justify="left" if column == "env" else "right")
    done = 0
    for (word, here), rows_of_one in itertools.groupby(rows, key=lambda row: (row[0], ways_of(*row[:2], ways))):
        with closing(Contest(word, mesh_detail, processes, list(here))) as contest:
            for _, batch, chunk in rows_of_one:
                cells = contest.row(batch, chunk, rounds, seconds)
                table.add_row(word, str(batch), str(chunk), *cells, *["–"] * (len(contestants) - len(cells)))
                done += 1
                progress = f"{done}/{len(rows)} rows, {time.monotonic() - start:.0f} s"
                console.print(f"{progress}: {word}, {batch} envs, chunk {chunk}: " + ", ".join(cells), highlight=False)
        table.add_section()
    console.print(table)
    console.print(f"medians of {rounds} rounds of {seconds:g} s; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    return None


if __name__ == "__main__":
    typer.run(main)
