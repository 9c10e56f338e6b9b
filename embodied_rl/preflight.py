"""Checks of a configuration against this machine, before a process starts: simulator, env id, assets,
rendering, checkpoint of the policy, run directory, and what is to be resumed. Imports neither Ray nor a simulator, and
torch only to look at a checkpoint.
"""

from __future__ import annotations

import difflib
import importlib.util
import shutil
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from embodied_rl.config import Config, first_placement
from embodied_rl.consistency import GROUPS, episode_fault, visible_devices
from embodied_rl.faults import Fault, any_of
from embodied_rl.mixture import env_parts
from embodied_rl.policy_faults import policy_faults
from embodied_rl.run_faults import run_faults
from envs.base import EnvError
from envs.catalog import download_command, gymnasium_envs, maniskill_envs, missing_assets
from envs.handle import finds
from envs.put_on_plate.assets import is_bridge, lacking
from envs.put_on_plate.scenes import HORIZON, SCENES
from scheduler.placement import parse_placement

MAY_CHANGE = ("env.processes", "env.step_timeout_s", "env.server", "env.python")  # in a resumed run


def preflight(
    config: Config, run_dir: Path, resume: bool, dry_run: bool, defaulted: Collection[str] = ()
) -> list[Fault]:
    """Everything on this machine that keeps the run from starting.

    Args:
        dry_run: leave out what takes a process of its own (the search for a Vulkan device).
        defaulted: keys that were not understood; checks that need them are left out.
    """
    faults = environment_faults(config, dry_run, defaulted)
    if not any(key.startswith("policy.") for key in defaulted):
        faults += policy_faults(config)
    faults += run_faults(config, run_dir, resume, defaulted, MAY_CHANGE, partial(_rank_faults, config))
    return faults


def environment_faults(config: Config, dry_run: bool, defaulted: Collection[str] = ()) -> list[Fault]:
    """What keeps the env from being made here: simulator, id, assets, rendering, GPU."""
    if "env.kind" in defaulted:
        return []
    checks = {"maniskill": _maniskill_faults, "libero": _libero_faults, "gymnasium": _gymnasium_faults}
    faults = []
    parts = env_parts(config.env)
    for part in parts:
        elsewhere = part.env.server or part.env.python
        check = _elsewhere_faults if elsewhere else checks.get(part.env.kind, _own_faults)
        found = check(config.model_copy(update={"env": part.env}), dry_run)
        faults += [fault for keys, fault in found if not set(keys) & set(defaulted)]
    if not {"env.server", "env.server_token_file", "env.mix"} & set(defaulted):
        asked_for = {part.env.server_token_file for part in parts if part.env.server}
        unused = [file for part in parts if (file := part.env.server_token_file) not in (None, *asked_for)]
        problem = "needs env.server: nothing else asks for a token"
        faults += [Fault("env.server_token_file", file, problem, "give one, or leave this out") for file in unused]
    return [fault for number, fault in enumerate(faults) if fault not in faults[:number]]


def unchecked(config: Config) -> list[str]:
    """What a dry run does not check, each as a sentence's part."""
    items = ["whether the env starts", "the size of observations and actions"]
    if config.env.kind == "maniskill" and ("image" in config.env.observation or config.evaluation.videos):
        items.insert(0, "whether a Vulkan device can render (`embodied-rl doctor` does)")
    if visible_devices(config) is None:
        items.append("the placement, against the devices of the cluster that the run joins")
    return items


# --- the env ------------------------------------------------------------------------------------------------


def _elsewhere_faults(config: Config, dry_run: bool) -> Iterator[tuple[tuple[str, ...], Fault]]:
    """Of envs in another virtual environment or on a server, which says itself what it lacks."""
    from envs.wire import read_token

    env = config.env
    if env.python is not None and shutil.which(env.python) is None:
        yield ("env.python",), Fault("env.python", env.python, "no such interpreter", "such as VENV/bin/python")
    if env.python is not None and env.server:
        problem = "env.server is given too, whose interpreter is its own"
        yield ("env.python", "env.server"), Fault("env.python", env.python, problem, "leave one out")
    if env.sim_backend == "gpu":
        problem = "envs of a server, or of another interpreter, are simulated on CPUs"
        fault = Fault("env.sim_backend", "gpu", problem, "nearest valid: auto")
        yield ("env.sim_backend", "env.server", "env.python"), fault
    try:
        if env.server_token_file is not None:
            read_token(env.server_token_file)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        yield ("env.server_token_file",), Fault("env.server_token_file", env.server_token_file, problem)
    except ValueError as error:
        yield ("env.server_token_file",), Fault("env.server_token_file", env.server_token_file, str(error))


def _own_faults(config: Config, dry_run: bool) -> Iterator[tuple[tuple[str, ...], Fault]]:
    module = config.env.kind.partition(":")[0]
    if not finds(module):
        hint = "install what provides it, start where it lies, or name an env.server that has it"
        yield ("env.kind",), Fault("env.kind", config.env.kind, f"no module {module}", hint)


def _maniskill_faults(config: Config, dry_run: bool) -> Iterator[tuple[tuple[str, ...], Fault]]:
    from embodied_rl.doctor import simulator_problem
    from embodied_rl.vulkan import vulkan_problem

    env = config.env
    if problem := simulator_problem("maniskill"):
        what, _, command = problem.partition("; ")
        yield ("env.kind",), Fault("env.kind", env.kind, what, command)
        return
    known = maniskill_envs()
    module, _, name = env.id.rpartition(":")
    if fault := _missing_module(module, env.id):
        yield ("env.id",), fault
    elif is_bridge(env.id):
        yield from _bridge_faults(config)
    elif module:  # ManiSkill's registry learns of it when gymnasium imports the module
        return
    elif env.id not in known:
        ids = {*known, *SCENES}
        hint = _near_ids(env.id, ids, "gymnasium", gymnasium_envs())
        yield ("env.id",), Fault("env.id", env.id, "no such ManiSkill env", hint)
    elif missing := missing_assets(env.id):
        problem = f"its assets are not downloaded: {', '.join(missing)}"
        hint = f"run: {download_command(missing)}"
        yield ("env.id",), Fault("env.id", env.id, problem, hint, obtainable=True)
    steps = HORIZON if name in SCENES else known[name].max_episode_steps if name in known else None
    yield from _own_horizon(config, steps)
    if "image" in env.observation and not dry_run and (problem := vulkan_problem()):
        hint = "see `embodied-rl doctor`, or train from state: env.observation=[state]"
        yield (
            ("env.observation",),
            Fault("env.observation", list(env.observation), f"images need {problem}", hint),
        )
    devices = visible_devices(config)
    if env.sim_backend == "gpu" and devices is not None and devices[1] != "gpu":
        fault = Fault("env.sim_backend", env.sim_backend, "no GPU among this run's devices", "nearest valid: auto")
        yield ("env.sim_backend", "cluster.cpu_slots"), fault


def _bridge_faults(config: Config) -> Iterator[tuple[tuple[str, ...], Fault]]:
    """Of ManiSkill's scenes on the Bridge table: assets, and the only ways in which they can be seen and rewarded."""
    env = config.env
    if missing := lacking(env.id):
        hint = f"run: {missing.command} (docs/put_on_plate.md)"
        yield ("env.id",), Fault("env.id", env.id, f"not on this machine: {missing}", hint, obtainable=True)
    if env.observation != ("image",):
        problem = f"{env.id} shows its camera and nothing else"
        fault = Fault("env.observation", list(env.observation), problem, "nearest valid: [image]")
        yield ("env.observation", "env.id"), fault
    if env.reward_mode != "none":
        problem = f"{env.id} has no reward of its own, and is paid RL4VLA's"
        yield ("env.reward_mode", "env.id"), Fault("env.reward_mode", env.reward_mode, problem, "nearest valid: none")


def _missing_module(module: str, value: str) -> Fault | None:
    """An env id MODULE:ID whose module is not there."""
    if not module or finds(module):
        return None
    return Fault("env.id", value, f"no module {module}", f"install what provides {module}, or start where it lies")


def _libero_faults(config: Config, dry_run: bool) -> Iterator[tuple[tuple[str, ...], Fault]]:
    from embodied_rl.doctor import OPENGL_FIX
    from envs import libero_rendering, libero_suites

    env = config.env
    try:
        libero_suites.package()
    except EnvError as error:
        what, _, command = str(error).partition("; ")
        yield ("env.kind",), Fault("env.kind", env.kind, what, command)
        return
    try:
        suite, _ = libero_suites.parse_id(env.id)
    except EnvError as error:
        what, _, hint = str(error).partition("; ")
        yield ("env.id",), Fault("env.id", env.id, what, hint)
    else:
        yield from _own_horizon(config, libero_suites.HORIZONS[suite])
    if "image" in env.observation and libero_rendering.choose() is None:
        fault = Fault("env.observation", list(env.observation), libero_rendering.NO_RENDERER, OPENGL_FIX)
        yield ("env.observation",), fault


def _gymnasium_faults(config: Config, dry_run: bool) -> Iterator[tuple[tuple[str, ...], Fault]]:
    env = config.env
    if importlib.util.find_spec("gymnasium") is None:
        yield (
            ("env.kind",),
            Fault("env.kind", env.kind, "gymnasium is not installed", "run: pip install gymnasium"),
        )
        return
    module, colon, _ = env.id.partition(":")
    if colon:  # gymnasium imports the module, which registers the env
        if fault := _missing_module(module, env.id):
            yield ("env.id",), fault
        return
    known = gymnasium_envs()
    if env.id not in known:
        hint = _near_ids(env.id, known, "maniskill", maniskill_envs())
        yield ("env.id",), Fault("env.id", env.id, "no such gymnasium env", hint)
        return
    entry = known[env.id]
    if entry.needs and importlib.util.find_spec(entry.needs) is None:
        problem = f"needs the module {entry.needs}, which is not installed"
        extra = "jax" if entry.needs == "jax" else entry.needs.lower()
        yield ("env.id",), Fault("env.id", env.id, problem, f"run: pip install 'gymnasium[{extra}]'")
    yield from _own_horizon(config, entry.max_episode_steps)


def _own_horizon(config: Config, steps: int | None) -> Iterator[tuple[tuple[str, ...], Fault]]:
    if config.env.horizon is None and steps is not None and (fault := episode_fault(config, steps, "the env's own")):
        yield ("env.id", "env.horizon", "rollout.steps", "policy.chunk", "algorithm.name"), fault


def _near_ids(env_id: str, known: Collection[str], other_kind: str, others: Collection[str]) -> str:
    if env_id in others:
        return f"it is an env of env.kind {other_kind}"
    by_lower = {name.lower(): name for name in known}
    near = [name for lower, name in by_lower.items() if lower.startswith(env_id.lower())]
    near += [by_lower[lower] for lower in difflib.get_close_matches(env_id.lower(), by_lower, n=3, cutoff=0.5)]
    return f"nearest: {any_of(list(dict.fromkeys(near))[:3])}" if near else f"for example {next(iter(known))}"


# --- the run directory --------------------------------------------------------------------------------------


def _rank_faults(config: Config, old: dict[str, Any], checkpoint: Path, hint: str) -> list[Fault]:
    """A checkpoint holds the state of each env and actor worker, so their number stays."""
    devices = visible_devices(config)
    if devices is None:
        return []
    try:
        texts = (first_placement(str(old.get("placement"))), config.initial_placement)
        old, new = (parse_placement(text, devices[0], GROUPS, devices[1]) for text in texts)
    except ValueError:  # this machine has other devices than the old one, or the placement is a fault of its own
        return []
    return [
        Fault(
            "placement",
            config.placement,
            f"gives {len(new[group].ranks)} {group} workers, and {checkpoint.name} holds the state of "
            f"{len(old[group].ranks)}",
            hint,
        )
        for group in ("env", "actor")
        if len(old[group].ranks) != len(new[group].ranks)
    ]
