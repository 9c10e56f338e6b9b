"""`embodied-rl plan`: what the planner makes of a measured profile, here or on another cluster. Starts nothing."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from embodied_rl.config import Config
from embodied_rl.consistency import visible_devices
from embodied_rl.flows import training_flow
from embodied_rl.profiles import known_profile, load_profile, machine_name, profiles_file, recipe_key
from scheduler.device_space import DeviceSet, PlanError
from scheduler.flow import Flow, PlannedGroup
from scheduler.placement import local_device_count, parse_placement
from scheduler.plan import Plan, compare, make_plan
from scheduler.plan_tree import device_text
from scheduler.profile import Profile, ProfileError, profiles_in

GIB = 2**30
MEMORY_GIB = {
    "A100": 80, "A100-40": 40, "A10": 24, "B200": 180, "GH200": 96, "H100": 80, "H200": 141, "L4": 24, "L40S": 48,
    "RTX3090": 24, "RTX4090": 24, "RTX5090": 32, "V100": 32,
}  # fmt: skip


def parse_cluster(text: str) -> tuple[DeviceSet, ...]:
    """Devices from "NODESxDEVICESxKIND" or "DEVICESxKIND", several joined by "+": "16x8xH100", "2x8xA100+4xL40S".

    A kind that is not known to have so much memory is given it after a colon, in GiB: "8xMI300:192"; kind "cpu" has no
    bound. Raises ValueError with what was expected.
    """
    sets = []
    for part in text.split("+"):
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z][\w-]*)(?::(\d+))?", part.strip())
        count = int(match[1] or 1) * int(match[2]) if match else 0
        if not match or count < 1:
            raise ValueError(
                f"'{part.strip()}' is not a set of devices; expected for example 16x8xH100, 8xL40S or 4xcpu"
            )
        kind, given = match[3], match[4]
        gib = int(given) if given else MEMORY_GIB.get(kind.upper())
        if gib is None and kind.lower() != "cpu":
            known = ", ".join(MEMORY_GIB)
            raise ValueError(
                f"the memory of a {kind} is not known; say it in GiB, as {part.strip()}:80 (known: {known})"
            )
        sets.append(DeviceSet(kind, count, None if gib is None else gib * GIB))
    return tuple(sets)


def find_profile(config: Config, file: Path | None) -> Profile:
    """This machine's profile of a recipe, or from `file` the only one of it. Raises ProfileError."""
    if file is None:
        return load_profile(config)
    key = recipe_key(config)
    machines = [machine for machine, recipe in profiles_in(file) if recipe == key]
    if len(machines) > 1 and machine_name() not in machines:
        raise ProfileError(f"{file} has profiles of {key} on several machines: {', '.join(machines)}")
    return load_profile(config, file, machines[0] if len(machines) == 1 else None)


def planned_flow(config: Config) -> Flow:
    """The training flow of a recipe, for planning without workers."""
    return training_flow(config, *(PlannedGroup(name) for name in ("env", "rollout", "actor")))


def expected_plan(config: Config) -> str:
    """One line for a dry run: the plan that a run here would settle on, as far as that is known."""
    profile = known_profile(config)
    flow = planned_flow(config)
    if not set(flow.calls()) <= set(profile.samples):
        return "not measured on this machine yet: the first iterations measure, then it is planned"
    try:
        count, kind = visible_devices(config) or (1, "gpu")
        plan = _plan(config, profile, flow, (DeviceSet(kind, count),))
    except PlanError as error:
        return str(error).splitlines()[-1].strip()
    groups = ", ".join(map(str, plan.loop_groups.values()))
    return f"{plan.placement_text}, S = {groups}: {plan.predicted_s:.3g} s an iteration, from earlier runs here"


def _plan(config: Config, profile: Profile, flow: Flow, sets: tuple[DeviceSet, ...]) -> Plan:
    if config.placement == "auto":
        return make_plan(flow, profile, sets, config.env.num_envs)
    (devices,) = sets
    placed = parse_placement(config.placement, devices.count, flow.groups(), "cpu" if devices.kind == "cpu" else "gpu")
    return Plan.from_placement(flow, placed, profile, config.env.num_envs, sets)


def print_plan(
    config: Config, profile: Profile, cluster: tuple[DeviceSet, ...] | None, side_by_side: bool, svg: Path | None
) -> Plan:
    """Print the plan of a recipe, for a cluster or for this machine; returns it. Raises PlanError."""
    count, kind = local_device_count(config.cluster.cpu_slots)
    sets = cluster or (DeviceSet(kind, count),)
    flow, items = planned_flow(config), config.env.num_envs
    plan = make_plan(flow, profile, sets, items) if cluster else _plan(config, profile, flow, sets)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(plan)
    console.print(plan.gantt())
    console.print(f"\nplacement        {plan.placement_text}")
    for name, groups in plan.loop_groups.items():
        console.print(f"pipeline groups  {groups} ({name})")
    console.print(
        f"an iteration     {plan.predicted_s:.4g} s predicted, {100 * plan.idle_share:.0f} % of device time idle"
    )
    for devices, used in _memory(plan):
        console.print(f"memory           {used / GIB:.2f} GiB on each of devices {devices}")
    console.print(f"measured on      {profile.machine}")
    if cluster and not all(s.kind == kind for s in sets):
        console.print(f"times            as measured there on {kind}: a device of another kind is taken to be as fast")
    if side_by_side:
        console.print()
        console.print(str(compare(flow, profile, sets, items)))
    if svg is not None:
        svg.parent.mkdir(parents=True, exist_ok=True)
        svg.write_text(plan.gantt_svg())
        console.print(f"picture          {svg}")
    return plan


def _memory(plan: Plan) -> list[tuple[str, int]]:
    """Devices that need the same memory, together."""
    needs: dict[int, list[int]] = {}
    for device, used in plan.memory_bytes.items():
        needs.setdefault(used, []).append(device)
    return [(device_text(tuple(devices)), used) for used, devices in needs.items()]


def how_to_measure(recipe: str) -> str:
    """What to do where nothing has been measured."""
    return f"run some iterations of it first: embodied-rl train {recipe} train.iterations=8 (kept in {profiles_file()})"
