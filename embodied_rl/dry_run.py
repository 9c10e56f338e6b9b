"""What `--dry-run` prints: the resolved configuration, where everything would run, and in how much memory.

From the configuration and the number of devices alone; nothing is started, so sizes that only a running env
knows are assumed, and said to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from rich.console import Console
from rich.text import Text

from embodied_rl.config import Config
from embodied_rl.consistency import GROUPS, VLA_TITLES, visible_devices
from embodied_rl.faults import Fault, show
from embodied_rl.planning import expected_plan
from embodied_rl.preflight import unchecked
from embodied_rl.schema import all_keys, flat
from embodied_rl.vla import VLA
from scheduler.placement import GroupPlacement, parse_placement

if TYPE_CHECKING:
    from policies.openvla.memory import MemoryEstimate

GB = 1e9
ENV_PROCESS_GB = {"maniskill": 0.8, "libero": 2.2, "gymnasium": 0.1}
WORKER_GB = 0.45
# Assumed where only a running env knows: numbers in an observation, action dimensions, cameras.
STATE_SIZE, ACTION_SIZE, CAMERAS = 64, 8, 1
GPU_GB, GPU_COUNTS = 80, (1, 8)
ACTION_TOKENS = 7  # of one action
ASSUMED_DEVICE = {"gpu": (400e12, 3e12), "cpu": (50e9, 10e9)}  # operations and bytes in a second: an H100, a core


@dataclass(frozen=True)
class Plan:
    """Who runs where. `processes`: env processes in each env rank."""

    device_kind: str
    placed: dict[str, GroupPlacement]
    processes: int
    envs_per_process: int
    chunk_steps: int
    batch: int
    optimiser_steps: int


def make_plan(config: Config, devices: tuple[int, Literal["cpu", "gpu"]] | None = None) -> Plan:
    """The plan of a configuration without faults, on this machine's devices if none are named. A cluster to join is
    taken to have one GPU."""
    count, kind = devices or visible_devices(config) or (1, "gpu")
    placed = parse_placement(config.initial_placement, count, GROUPS, kind)
    env_ranks = placed["env"].ranks
    envs = math.ceil(config.env.num_envs / len(env_ranks))
    processes = config.env.processes or len(env_ranks[0])
    return Plan(
        device_kind=kind,
        placed=placed,
        processes=processes,
        envs_per_process=math.ceil(envs / processes),
        chunk_steps=config.chunk_steps,
        batch=config.rollout.epochs * config.chunk_steps * config.env.num_envs,
        optimiser_steps=config.algorithm.epochs * config.algorithm.minibatches,
    )


def memory_estimate(config: Config, plan: Plan) -> dict[str, tuple[float, str]]:
    """GB of host memory by part, each with the formula it comes from."""
    env_processes = plan.processes * len(plan.placed["env"].ranks)
    workers = sum(len(group.ranks) for group in plan.placed.values())
    each = ENV_PROCESS_GB.get(config.env.kind, ENV_PROCESS_GB["gymnasium"])
    image = CAMERAS * config.env.image_size**2 * 3 if "image" in config.env.observation else 0
    if config.policy.vla is not None:
        image = _vla_memory(config, VLA.of(config.policy), plan).recorded
    state = 4 * STATE_SIZE if "state" in config.env.observation else 0
    chunk = config.policy.chunk
    # Action, sample and log-prob of each dimension; reward and 3 flags of each sub-step; value, advantage.
    step_bytes = state + image + chunk * (3 * 4 * ACTION_SIZE + 7) + 8
    estimate = {
        "env processes": (env_processes * each, f"{env_processes} x {each:g} GB ({config.env.kind})"),
        "workers": (workers * WORKER_GB, f"{workers} x {WORKER_GB:g} GB"),
        "rollout buffer": (plan.batch * step_bytes / GB, f"{plan.batch} chunk steps x {step_bytes} bytes"),
    }
    if config.policy.vla is None:
        estimate["network"] = _network(config, plan)
    return estimate


def _network(config: Config, plan: Plan) -> tuple[float, str]:
    """GB of all copies of an MLP policy."""
    widths = (STATE_SIZE, *config.policy.hidden)
    body = sum(fan_in * fan_out + fan_out for fan_in, fan_out in zip(widths, widths[1:], strict=False))
    heads = (widths[-1] + 1) * ACTION_SIZE * config.policy.chunk + widths[-1] + 1
    parameters = 2 * body + heads
    copies = len(plan.placed["actor"].ranks) * 16 + len(plan.placed["rollout"].ranks) * 4
    formula = f"{parameters} parameters x (4 weights + 8 Adam + 4 gradients bytes in an actor, 4 in a rollout)"
    return parameters * copies / GB, formula


def vla_estimate(config: Config, vla: VLA, plan: Plan) -> list[tuple[str, float, str]]:
    """Of a policy with action tokens: name, number and unit with what it comes from; on one device of a group."""
    rollouts, streams = len(plan.placed["rollout"].ranks), _streams(config, plan)
    envs, (step, steps) = math.ceil(config.env.num_envs / streams), _learning_steps(config, plan)
    micro_batch, found = _micro_batch(config, step), _vla_memory(config, vla, plan)
    rate, bandwidth = ASSUMED_DEVICE[plan.device_kind]
    calls = config.rollout.epochs * plan.chunk_steps * streams / rollouts
    passes = ACTION_TOKENS if vla.kind == "openvla" else 1  # token by token, or all at once
    rollout_s = calls * (envs * found.flops / rate + passes * found.parameters / bandwidth)
    update_s = steps * step * found.learning_flops / rate
    parts = ("parameters", "gradients", "optimiser", "activations")
    learning = " + ".join(f"{getattr(found, part) / GB:.3f} {part}" for part in parts)
    inference = f"{found.parameters / GB:.3f} parameters + {found.keys_values / GB:.3f} keys and values of {envs} envs"
    device = f"if a device does {rate / 1e12:g} TFLOP/s and reads {bandwidth / GB:g} GB/s"
    return [
        ("actor", found.learning / GB, f"GB = {learning} of {micro_batch} samples"),
        ("rollout", found.inference / GB, f"GB = {inference}"),
        ("acting", rollout_s, f"s an iteration, {calls:g} calls, {device}"),
        ("learning", update_s, f"s an iteration, {steps} optimiser steps on {step} samples of a rank"),
    ]


def _vla_memory(config: Config, vla: VLA, plan: Plan) -> MemoryEstimate:
    """Of the envs of a stream, and of a micro-batch."""
    envs = math.ceil(config.env.num_envs / _streams(config, plan))
    return vla.memory(envs, _micro_batch(config, _learning_steps(config, plan)[0]))


def _streams(config: Config, plan: Plan) -> int:
    return len(plan.placed["env"].ranks) * max(config.pipeline_choices)


def _learning_steps(config: Config, plan: Plan) -> tuple[int, int]:
    """Samples of a rank in an optimiser step, and such steps in an iteration."""
    actors = len(plan.placed["actor"].ranks)
    if config.sft.data is not None:
        return math.ceil(config.sft.batch / actors), config.sft.steps
    return math.ceil(plan.batch / actors / config.algorithm.minibatches), plan.optimiser_steps


def _micro_batch(config: Config, step: int) -> int:
    return min(config.algorithm.micro_batch or step, step)


def _work(config: Config, plan: Plan) -> list[str]:
    """What an iteration consists of."""
    iterations = f"{config.train.iterations} iterations"
    if config.sft.data is not None:
        sft = config.sft
        return [f"updates  {sft.steps} optimiser steps an iteration on {sft.batch} decisions each, {iterations}"]
    algorithm = config.algorithm
    return [
        f"T        {plan.chunk_steps} chunk steps of {config.policy.chunk} action(s) for each env",
        f"batch    {plan.batch} chunk steps an iteration, {plan.batch * config.policy.chunk} env steps",
        f"updates  {plan.optimiser_steps} optimiser steps an iteration ({algorithm.epochs} epochs x "
        f"{algorithm.minibatches} minibatches), {iterations}",
        f"schedule {expected_plan(config)}",
    ]


def _print_vla(console: Console, config: Config, plan: Plan) -> None:
    """What a policy with action tokens takes here, and on GPUs of 80 GB."""
    from policies.lora import describe

    vla = VLA.of(config.policy)
    title = VLA_TITLES[vla.kind]
    _heading(console, f"{title}, on each device", f"roughly; assumes {ACTION_TOKENS} tokens in an action")
    for name, value, what in vla_estimate(config, vla, plan):
        console.print(f"  {name:15} {value:8.3f} {what}")
    for line in describe(vla.adapted_modules()) if vla.settings.lora or vla.settings.adapter else []:
        console.print(f"  adapters on {line}")
    _heading(console, f"{title} on GPUs of {GPU_GB} GB", "all workers on all of them; the whole model on each")
    for count in GPU_COUNTS:
        console.print(f"  {gpu_line(config, vla, count)}")


def gpu_line(config: Config, vla: VLA, count: int) -> str:
    """What each of so many GPUs would hold, and how long they would take."""
    found = {name: value for name, value, _ in vla_estimate(config, vla, make_plan(config, (count, "gpu")))}
    actor, rollout = found["actor"], found["rollout"]
    if actor + rollout <= GPU_GB:
        fit = "side by side"
    elif max(actor, rollout) <= GPU_GB:
        fit = "by turns"
    else:
        fit = f"do not fit: try policy.{vla.kind}.lora_rank, gradient_checkpointing, or a smaller algorithm.micro_batch"
    device = "1 GPU " if count == 1 else f"{count} GPUs"
    times = [f"{found[name]:.3g} s" if found[name] >= 0.1 else "under 0.1 s" for name in ("acting", "learning")]
    seconds = f"acting {times[0]} and learning {times[1]} an iteration, besides simulation"
    return f"{device}  actor {actor:.1f} GB and rollout {rollout:.1f} GB {fit}; {seconds}"


def print_dry_run(config: Config, run_dir: Path, resume: bool, needed: Sequence[Fault] = ()) -> None:
    """Prints configuration, plan, memory estimate, what is still `needed` and what was not checked to stdout."""
    console = Console(soft_wrap=True, highlight=False)
    plan = make_plan(config)
    _heading(console, "Configuration", "keys that differ from their defaults are marked")
    console.print(_marked_yaml(config))
    _heading(console, "Plan", f"{'resumes' if resume else 'would write to'} {run_dir}")
    for name, group in plan.placed.items():
        devices = ", ".join(map(str, group.devices))
        console.print(f"  {name:8} {len(group.ranks)} rank(s) on {plan.device_kind} {devices}")
    console.print(
        f"  envs     {config.env.num_envs} in all; {plan.processes} process(es) for each env rank, up to "
        f"{plan.envs_per_process} envs in each; {config.rollout.pipeline_stages} pipeline stage(s)"
    )
    for line in _work(config, plan):
        console.print(f"  {line}")
    estimate = memory_estimate(config, plan)
    _heading(
        console,
        "Memory, estimated",
        f"assumes {STATE_SIZE} numbers in the state, {ACTION_SIZE} action dimensions, {CAMERAS} camera",
    )
    for name, (gigabytes, formula) in estimate.items():
        console.print(f"  {name:15} {gigabytes:8.3f} GB = {formula}")
    console.print(f"  {'in all':15} {sum(gigabytes for gigabytes, _ in estimate.values()):8.3f} GB")
    if config.policy.vla is not None:
        _print_vla(console, config, plan)
    if needed:
        _heading(console, "Still needed", "without it the run does not start")
    for fault in needed:
        console.print(Text(f"  - {fault.key} = {show(fault.value)}: {fault.problem}; {fault.hint}"))
    _heading(console, "Not checked", "nothing was started")
    for item in unchecked(config):
        console.print(f"  - {item}")


def _heading(console: Console, title: str, note: str) -> None:
    console.print(Text.assemble((title, "bold"), f" ({note})"))


def _marked_yaml(config: Config) -> Text:
    """The configuration as YAML; a changed key is green and carries its default as a comment."""
    values, text, open_section = flat(config.model_dump(mode="json")), Text(), ""
    for name, key in all_keys().items():
        section, _, leaf = name.rpartition(".")
        depth = section.count(".") + bool(section)
        if section != open_section:
            text.append(f"{'  ' * (depth - 1)}{section.rpartition('.')[2]}:\n" if section else "")
            open_section = section
        line = f"{'  ' * depth}{leaf}: {_flow(values[name])}"
        if values[name] == key.default:
            text.append(f"{line}\n")
        else:
            text.append(f"{line}  # default: {_flow(key.default)}\n", "bold green")
    text.rstrip()
    return text


def _flow(value: Any) -> str:
    return yaml.safe_dump([value], default_flow_style=True, width=10_000).strip()[1:-1]
