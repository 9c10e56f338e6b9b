"""LIBERO env steps per second: the package's own loop and vector env against this project's, side by side in one run.

    python benchmarks/libero_throughput.py                 the table
    python benchmarks/libero_throughput.py --resets 300    episodes per minute and memory of one process

Every row renders both cameras wherever it renders. "CPU" is processor time for an env step, which does not depend on
what else the machine does; ratios are of it, for one process, to the package's loop at the same image size.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import psutil

from envs import libero_suites
from envs.base import EnvSettings
from envs.libero_suites import init_state_id
from envs.pool import EnvPool

SUITE, TASK = "libero_object", 0
STILL = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)


@dataclass(frozen=True)
class Speed:
    """Of some env steps: seconds on the clock and of processor time."""

    steps: int
    wall: float
    cpu: float

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu / self.steps


def plain_loop(size: int, steps: int) -> Speed:
    """The package's env, stepped as in published evaluations."""
    env = _package_env(size)()
    env.reset()
    env.set_init_state(libero_suites.init_states(SUITE, TASK)[0])
    env.step(STILL)
    start, cpu = time.monotonic(), time.process_time()
    for _ in range(steps):
        env.step(STILL)
    return Speed(steps, time.monotonic() - start, time.process_time() - cpu)


def package_vector_env(size: int, processes: int, steps: int) -> Speed | None:
    """The package's SubprocVectorEnv; None where it cannot be used."""
    try:
        from libero.libero.envs import SubprocVectorEnv

        env = SubprocVectorEnv([_package_env(size)] * processes)
    except (ImportError, TypeError, AttributeError) as error:
        print(f"SubprocVectorEnv cannot be used: {error}")
        return None
    env.reset()
    env.set_init_state([libero_suites.init_states(SUITE, TASK)[0]] * processes)
    env.step(np.array([STILL] * processes))
    start, cpu = time.monotonic(), _children_cpu()
    for _ in range(steps):
        env.step(np.array([STILL] * processes))
    speed = Speed(steps * processes, time.monotonic() - start, _children_cpu() - cpu)
    env.close()
    return speed


def ours(size: int, chunk: int, processes: int, steps: int) -> Speed:
    """This project's env processes."""
    pool = EnvPool(processes, 300)
    try:
        env = pool.vector_env(_settings(size), range(processes), chunk=chunk, auto_reset=False)
        env.reset(init_state_ids=[init_state_id(TASK, 0)] * processes)
        actions = np.full((processes, chunk, 7), STILL, np.float32)
        env.chunk_step(actions)
        start, cpu = time.monotonic(), 0.0
        for _ in range(steps // chunk):
            cpu += sum(seconds for *_, seconds in env.chunk_step(actions).spans)
        return Speed(steps // chunk * chunk * processes, time.monotonic() - start, cpu)
    finally:
        pool.close()


def resets(count: int, size: int) -> None:
    """Short episodes, one after another, in one process."""
    pool = EnvPool(1, 300)
    try:
        env = pool.vector_env(_settings(size), [0], chunk=8, auto_reset=False)
        process, start = psutil.Process(pool.pids[0]), time.monotonic()
        actions = np.full((1, 8, 7), STILL, np.float32)
        print("episodes  episodes/min  CPU s/episode  memory (MB)")
        every, cpu = max(1, count // 6), sum(process.cpu_times()[:2])
        for number in range(1, count + 1):
            env.reset(init_state_ids=[init_state_id(TASK, number % 50)])
            env.chunk_step(actions)
            if number % every == 0:
                rate, used = 60 * every / (time.monotonic() - start), sum(process.cpu_times()[:2])
                memory = process.memory_info().rss / 1e6
                print(f"{number:8}  {rate:12.1f}  {(used - cpu) / every:13.3f}  {memory:11.0f}", flush=True)
                start, cpu = time.monotonic(), used
    finally:
        pool.close()


def table(steps: int) -> None:
    print(f"{'':34}  steps/s  CPU ms/step  ratio", flush=True)
    for size in (128, 256):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            base = fresh.submit(plain_loop, size, steps).result()
        _show(f"package's loop, {size} px", base, base)
        if (speed := package_vector_env(size, 2, steps)) is not None:
            _show(f"SubprocVectorEnv, 2 envs, {size} px", speed, base)
        for chunk in (1, 8):
            for processes in (1, 2):
                speed = ours(size, chunk, processes, steps)
                _show(f"ours, chunk {chunk}, {processes} processes, {size} px", speed, base)


def _show(name: str, speed: Speed, base: Speed) -> None:
    ratio = base.cpu_ms / speed.cpu_ms
    print(f"{name:34}  {speed.steps / speed.wall:7.1f}  {speed.cpu_ms:11.1f}  {ratio:5.2f}", flush=True)


def _settings(size: int) -> EnvSettings:
    return EnvSettings("libero", f"{SUITE}/{TASK}", observation=("state", "image"), simulator={"image_size": size})


def _package_env(size: int) -> Callable[[], object]:
    def make() -> object:
        from libero.libero.envs import OffScreenRenderEnv

        file = str(libero_suites.bddl_file(SUITE, TASK))
        with contextlib.redirect_stdout(io.StringIO()):
            return OffScreenRenderEnv(bddl_file_name=file, camera_heights=size, camera_widths=size)

    return make


def _children_cpu() -> float:
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="env steps of each process in a row of the table")
    parser.add_argument("--resets", type=int, default=0, help="measure this many episodes instead")
    parser.add_argument("--size", type=int, default=128, help="pixels, with --resets")
    asked = parser.parse_args()
    if asked.resets:
        resets(asked.resets, asked.size)
    else:
        table(asked.steps)
