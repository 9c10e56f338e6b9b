"""Env steps per second through an env server, against the env pool in the same process.

    python benchmarks/env_server.py                                    # an env that does nothing: what the way costs
    python benchmarks/env_server.py --env PushCube-v1 --batches 2,8
    python benchmarks/env_server.py --env libero_object/0 --image --batches 2

Contestants: the pool in this process; a server on the same host by ipc, with shared memory; one by tcp on the loopback,
everything going over the wire; and a websocket server that speaks JSON, arrays as base64, as is common. All have as
many env processes. They are set up first, then measured in turn, round after round; printed are medians, and the
medians of each round's ratio to the pool.
"""

from __future__ import annotations

import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
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


def settings_of(env: str, image: bool) -> EnvSettings:
    observation = ("state", "image") if image else ("state",)
    if env == "empty":
        return EnvSettings(EMPTY, "Empty", observation=observation)
    kind = "libero" if env.partition("/")[0] in SUITES else "maniskill"
    return EnvSettings(kind, env, observation=observation, simulator={"image_size": 256 if kind == "libero" else 128})


class JsonEnv:
    """A vector env behind a websocket that speaks JSON, in a process of its own."""

    def __init__(self, env: str, image: bool, batch: int, chunk: int, processes: int) -> None:
        options = [env, str(int(image)), str(batch), str(chunk), str(processes)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve-json", ",".join(options)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        address = f"ws://127.0.0.1:{self._process.stdout.readline().strip()}"
        self._open = ExitStack()
        self._socket = self._open.enter_context(connect(address, max_size=None))

    def chunk_step(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        self._socket.send(json.dumps({"actions": as_json(actions)}))
        return {key: of_json(value) for key, value in json.loads(self._socket.recv()).items()}

    def close(self) -> None:
        self._open.close()
        self._process.kill()
        self._process.wait()


def serve_json(env: str, image: bool, batch: int, chunk: int, processes: int) -> None:
    """The program of a `JsonEnv`'s process."""
    vector = EnvPool(processes).vector_env(settings_of(env, image), range(batch), chunk)
    vector.reset()

    def talk(socket: Any) -> None:
        for message in socket:
            result = vector.chunk_step(of_json(json.loads(message)["actions"]))
            arrays = {name: getattr(result, name) for name in ("reward", "terminated", "truncated", "valid")}
            arrays |= {key: value for key, value in result.observation.items() if isinstance(value, np.ndarray)}
            socket.send(json.dumps({name: as_json(array) for name, array in arrays.items()}))

    with serve(talk, "127.0.0.1", 0, max_size=None) as server:
        print(server.socket.getsockname()[1], flush=True)
        server.serve_forever()


def as_json(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": array.shape, "data": base64.b64encode(array.tobytes()).decode()}


def of_json(value: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"])


def measure(env: Any, actions: np.ndarray, seconds: float) -> float:
    """Seconds of one chunk step."""
    steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not steps:
        env.chunk_step(actions)
        steps += 1
    return elapsed / steps if steps else seconds


def main(
    env: Annotated[str, typer.Option(help="empty, an id of ManiSkill, or LIBERO tasks")] = "empty",
    image: Annotated[bool, typer.Option("--image", help="with pictures; LIBERO and empty: 2 x 256 x 256")] = False,
    batches: Annotated[str, typer.Option(help="numbers of envs")] = "1,4,16,64",
    chunks: Annotated[str, typer.Option(help="actions in a chunk")] = "1,8",
    processes: Annotated[int, typer.Option(help="env processes of each contestant")] = 2,
    rounds: Annotated[int, typer.Option(help="measurements of each contestant")] = 7,
    seconds: Annotated[float, typer.Option(help="of one measurement, at least one chunk")] = 0.3,
    serve_json_options: Annotated[str, typer.Option("--serve-json", hidden=True)] = "",
) -> None:
    """Compare the pool with env servers."""
    if serve_json_options:
        name, *numbers = serve_json_options.rsplit(",", 4)
        return serve_json(name, bool(int(numbers[0])), *map(int, numbers[1:]))
    os.chdir(HERE)  # where servers find `Empty`
    settings = settings_of(env, image)
    folder = tempfile.mkdtemp()
    servers = [
        ServerProcess([settings.kind, settings.id, "--bind", bind, "--processes", str(processes)])
        for bind in (f"ipc://{folder}/server", "tcp://127.0.0.1:*")
    ]
    pools = [EnvPool(processes), *(RemotePool(server.address, settings.kind, settings.id) for server in servers)]
    names = ("pool in process", "ipc, shared memory", "tcp, all on the wire", "websocket and JSON")
    table = Table(title=f"{settings.id}{', pictures' if image else ', state'}: ms of a chunk step (ratio to the pool)")
    for column in ("envs", "chunk", *names):
        table.add_column(column, justify="right")
    for batch in map(int, batches.split(",")):
        for chunk in map(int, chunks.split(",")):
            used = min(processes, batch)
            vectors: list[Any] = [pool.vector_env(settings, range(batch), chunk) for pool in pools[:2]]
            with patch("envs.client.map_shared", lambda *_: None):
                vectors.append(pools[2].vector_env(settings, range(batch), chunk))
            for vector in vectors:
                vector.reset()
            assert vectors[1].is_shared and not vectors[2].is_shared
            vectors.append(JsonEnv(env, image, batch, chunk, used))
            actions = np.zeros((batch, chunk, vectors[0].spec.action.size), np.float32)
            for vector in vectors:
                measure(vector, actions, seconds)
            found = [[measure(vector, actions, seconds) for vector in vectors] for _ in range(rounds)]
            medians = [1000 * statistics.median(times) for times in zip(*found, strict=True)]
            ratios = [statistics.median(row[0] / row[i] for row in found) for i in range(len(vectors))]
            cells = [f"{ms:.2f}  ({ratio:.2f})" for ms, ratio in zip(medians, ratios, strict=True)]
            table.add_row(str(batch), str(chunk), *cells)
            for vector in vectors:
                vector.close()
    for pool in pools:
        pool.close()
    for server in servers:
        server.close()
    console = Console(width=140)
    console.print(table)
    console.print(f"medians of {rounds} rounds of {seconds:g} s; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    return None


if __name__ == "__main__":
    typer.run(main)
