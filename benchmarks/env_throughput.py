"""Env steps per second of ManiSkill on this machine's CPU: bare loops, gymnasium's AsyncVectorEnv, and the env pool.

    python benchmarks/env_throughput.py

The ceiling is what as many bare loops as the pool has processes reach side by side, each over as many envs as one
process of the pool hosts. All contestants are set up first, then measured in turn, round after round; printed are
medians, medians of each round's ratio to the ceiling of the same round, and the ratio of the highest rates: other
load only ever slows things down, so on a busy machine the highest say most. CPU time per step counts all processes of
this benchmark.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envs.base import EnvSettings
from envs.pool import EnvPool

CHUNKS = (1, 4, 8)
Measure = Callable[[float], float]  # runs for about so many seconds; returns steps per second


@dataclass(frozen=True)
class Task:
    id: str
    control_mode: str
    horizon: int
    sim_freq: int
    control_freq: int

    def make(self) -> Any:
        """The env as ManiSkill makes it."""
        import gymnasium
        import mani_skill.envs  # noqa: F401
        import torch

        from envs.maniskill import inert_materials

        torch.set_num_threads(1)
        with inert_materials():
            return gymnasium.make(
                self.id,
                obs_mode="state",
                control_mode=self.control_mode,
                reward_mode="normalized_dense",
                sim_config={"sim_freq": self.sim_freq, "control_freq": self.control_freq},
                sim_backend="physx_cpu",
                render_backend="none",
                max_episode_steps=self.horizon,
            )

    def make_cpu_gym(self) -> Any:
        """The env as ManiSkill's documentation makes it for gymnasium's vector envs."""
        from mani_skill.utils.wrappers import CPUGymWrapper

        return CPUGymWrapper(self.make())

    def settings(self) -> EnvSettings:
        keys = ("control_mode", "sim_freq", "control_freq")
        return EnvSettings("maniskill", self.id, self.horizon, simulator={key: getattr(self, key) for key in keys})


def bare_loop(task: Task, num_envs: int, connection: Connection) -> None:
    """The program of one bare process: steps its envs in a loop for as long as it is told, again and again."""
    envs = [task.make() for _ in range(num_envs)]
    rng, seed = np.random.default_rng(0), 0
    actions = [rng.uniform(-1, 1, envs[0].action_space.shape).astype(np.float32) for _ in range(1000)]
    for env in envs:
        env.reset(seed=seed)
    connection.send("ready")
    while (seconds := connection.recv()) is not None:
        steps, start = 0, time.monotonic()
        while time.monotonic() - start < seconds:
            for env in envs:
                _, _, terminated, truncated, _ = env.step(actions[steps % len(actions)])
                steps += 1
                if terminated or truncated:
                    seed += 1
                    env.reset(seed=seed)
        connection.send((steps, time.monotonic() - start))


class BareLoops:
    """Processes that run `bare_loop`."""

    def __init__(self, task: Task, processes: int, envs_each: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            context.Process(target=bare_loop, args=(task, envs_each, theirs), daemon=True).start()
            self.connections.append(ours)
        for connection in self.connections:
            connection.recv()

    def measure(self, how_many: int) -> Measure:
        def run(seconds: float) -> float:
            for connection in self.connections[:how_many]:
                connection.send(seconds)
            results = [connection.recv() for connection in self.connections[:how_many]]
            return sum(steps / elapsed for steps, elapsed in results)

        return run

    def close(self) -> None:
        for connection in self.connections:
            connection.send(None)


def async_vector_env(task: Task, processes: int) -> Measure:
    """gymnasium's own: one env in each process, all in step."""
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode

    env = AsyncVectorEnv(
        [task.make_cpu_gym] * processes, context="spawn", daemon=True, autoreset_mode=AutoresetMode.SAME_STEP
    )
    env.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (100, *env.action_space.shape)).astype(np.float32)

    def run(seconds: float) -> float:
        steps, start = 0, time.monotonic()
        while (elapsed := time.monotonic() - start) < seconds:
            env.step(actions[steps % len(actions)])
            steps += 1
        return steps * processes / elapsed

    return run


def pooled(pool: EnvPool, task: Task, envs_each: int, sets: int, chunk: int) -> Measure:
    """The env pool as an env worker uses it: while one set's outcome is looked at, the other sets are stepped."""
    share = len(pool.processes) * envs_each // sets
    vectors = [pool.vector_env(task.settings(), range(s * share, (s + 1) * share), chunk) for s in range(sets)]
    for vector in vectors:
        vector.reset()
    size = vectors[0].spec.action.size
    actions = np.random.default_rng(0).uniform(-1, 1, (100, share, chunk, size)).astype(np.float32)

    def run(seconds: float) -> float:
        steps, rounds, start = 0, 0, time.monotonic()
        for vector in vectors:
            vector.chunk_step_async(actions[0])
        while time.monotonic() - start < seconds:
            rounds += 1
            for vector in vectors:
                steps += int(vector.chunk_step_wait().valid.sum())
                vector.chunk_step_async(actions[rounds % len(actions)])
        for vector in vectors:
            steps += int(vector.chunk_step_wait().valid.sum())
        return steps / (time.monotonic() - start)

    return run


def cpu_seconds() -> float:
    """CPU time spent so far by this process and all that it started."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(spent.user + spent.system for spent in times)


def main(
    env: Annotated[str, typer.Option(help="ManiSkill env id")] = "PushCube-v1",
    control_mode: Annotated[str, typer.Option(help="ManiSkill controller")] = "pd_ee_delta_pose",
    horizon: Annotated[int, typer.Option(help="steps of an episode")] = 12,
    sim_freq: Annotated[int, typer.Option(help="physics rate, Hz")] = 50,
    control_freq: Annotated[int, typer.Option(help="control rate, Hz")] = 5,
    processes: Annotated[int, typer.Option(help="env processes")] = 2,
    envs_each: Annotated[int, typer.Option(help="envs in each process of the bare loops and of the pool")] = 4,
    sets: Annotated[int, typer.Option(help="sets of envs that the pool's envs are cut into, in flight at once")] = 2,
    rounds: Annotated[int, typer.Option(help="measurements of each contestant")] = 20,
    seconds: Annotated[float, typer.Option(help="of one measurement")] = 1.0,
) -> None:
    """Compare env throughput: bare loops, gymnasium's AsyncVectorEnv, the env pool."""
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console(width=140)
    task = Task(env, control_mode, horizon, sim_freq, control_freq)
    if processes * envs_each % sets:
        raise typer.BadParameter(f"{processes * envs_each} envs cannot be cut into {sets} equal sets")
    console.print("starting processes ...")
    bare = BareLoops(task, processes, envs_each)
    pool = EnvPool(processes)
    ceiling = f"{processes} bare loops, {envs_each} envs each (the ceiling)"
    contestants = {
        f"1 bare loop, {envs_each} envs": bare.measure(1),
        ceiling: bare.measure(processes),
        f"AsyncVectorEnv, {processes} processes, 1 env each": async_vector_env(task, processes),
        **{
            f"pool, {processes} processes, {envs_each} envs each, {sets} sets, chunk {chunk}": pooled(
                pool, task, envs_each, sets, chunk
            )
            for chunk in CHUNKS
        },
    }
    for measure in contestants.values():
        measure(0.5)
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    costs: dict[str, list[float]] = {name: [] for name in contestants}  # CPU ms per step
    for _ in track(range(rounds), "measuring", console=console):
        for name, measure in contestants.items():
            cpu, start = cpu_seconds(), time.monotonic()
            rates[name].append(measure(seconds))
            steps = rates[name][-1] * (time.monotonic() - start)
            costs[name].append(1000 * (cpu_seconds() - cpu) / steps)
    pool.close()
    bare.close()

    table = Table(title=f"{env}, {control_mode}, {sim_freq}/{control_freq} Hz, {horizon} steps, state observations")
    table.add_column("")
    for column in ("steps/s", "lowest", "highest", "of ceiling", "highest of highest", "CPU ms/step"):
        table.add_column(column, justify="right")
    for name, measured in rates.items():
        ratio = statistics.median(m / c for m, c in zip(measured, rates[ceiling], strict=True))
        highest = max(measured) / max(rates[ceiling])
        cells = [f"{rate:,.0f}" for rate in (statistics.median(measured), min(measured), max(measured))]
        table.add_row(name, *cells, f"{ratio:.2f}", f"{highest:.2f}", f"{statistics.median(costs[name]):.2f}")
    console.print(table)
    console.print(f"{rounds} rounds of {seconds:g} s each; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    typer.run(main)
