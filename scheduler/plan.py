"""The micro flow: `make_plan` decides where and when each stage of a flow runs, `Plan` is the decision.

    plan = make_plan(flow, profile, devices=8, items=512, memory_per_device=80 * 2**30)
    print(plan)                       # the tree, device sets, predicted seconds
    plan.gantt_svg()                  # a picture
    Plan.from_placement(flow, {"env": [0, 1], "rollout": [2, 3], "actor": range(4)}, profile, items=512)

What is minimised, over which plans, is written in `placement_search.py`; the costs of a given tree in `plan_tree.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.tree import Tree

from scheduler import plan_text
from scheduler.cuts import Graph
from scheduler.device_space import Costs, DeviceSet, Fixed, Grid, PlanError, Space, Style, useful_counts
from scheduler.flow import Flow, Node
from scheduler.gantt import gantt_svg, gantt_text
from scheduler.placement_search import Search
from scheduler.plan_tree import Devices, Leaf, PlanNode, busy_seconds, leaves, peak_memory
from scheduler.profile import Profile
from scheduler.simulate import simulate

MOST_GRANULARITIES = 12
SMALL_GRID = 16  # device counts up to which every one is tried


@dataclass(frozen=True)
class Plan:
    """Where and when the stages of a flow run, and how long an iteration of `items` items should take.

    Devices are numbered from 0 through the device sets in their order.
    """

    flow: str
    items: int
    devices: tuple[DeviceSet, ...]
    root: PlanNode
    resident_bytes: dict[str, int] = field(default_factory=dict)
    overhead_s: float = 0.0

    @property
    def predicted_s(self) -> float:
        """Of one iteration: what the tree takes, and the time before its first stage and after its last."""
        return self.root.seconds + self.overhead_s

    @property
    def num_devices(self) -> int:
        return sum(set_.count for set_ in self.devices)

    @property
    def stage_devices(self) -> dict[str, Devices]:
        """By worker method ("group.method")."""
        return {member: devices for leaf in leaves(self.root) for member, _, devices, _ in leaf.placed}

    @property
    def granularity(self) -> dict[str, int]:
        """Items of each call, by worker method; for a loop, items that go through it together (in all its groups)."""
        return {member: leaf.items for leaf in leaves(self.root) for member in leaf.members}

    @property
    def loop_groups(self) -> dict[str, int]:
        """Pipeline groups S of each loop, by the name of its node."""
        return {leaf.stage: leaf.loop.groups for leaf in leaves(self.root) if leaf.loop is not None}

    @property
    def placement(self) -> dict[str, Devices]:
        """Devices of each worker group."""
        found: dict[str, set[int]] = {}
        for leaf in leaves(self.root):
            for _, group, devices, _ in leaf.placed:
                found.setdefault(group, set()).update(devices)
        return {group: tuple(sorted(devices)) for group, devices in found.items()}

    @property
    def placement_text(self) -> str:
        """The same as `scheduler.placement.parse_placement` reads it."""
        return plan_text.placement_text(self.placement)

    @property
    def memory_bytes(self) -> dict[int, int]:
        """Peak bytes on each device that the plan uses."""
        return peak_memory(self.root, self.resident_bytes)

    @property
    def idle_share(self) -> float:
        """Share of all device time of an iteration without work (waits, switches, devices not used)."""
        available = self.predicted_s * self.num_devices
        return 1.0 - busy_seconds(self.root) / available if available else 0.0

    @classmethod
    def from_placement(
        cls,
        flow: Flow,
        placement: Mapping[str, Any],
        profile: Profile,
        items: int,
        devices: int | Sequence[Any] | Any | None = None,
        memory_per_device: int | None = None,
    ) -> Plan:
        """The best order, pipelining and granularity for device sets that were chosen by hand.

        Args:
            placement: devices by group: device numbers, or what `parse_placement` returns.
            devices: as in `make_plan`; default: up to the last one that the placement names.

        Raises PlanError for a missing or unknown group, a device that does not exist, or memory that does not suffice.
        """
        groups = flow.validate().groups()
        sets = {
            name: tuple(sorted(int(d) for d in getattr(value, "devices", value))) for name, value in placement.items()
        }
        if wrong := sorted(set(groups) ^ set(sets)):
            what = "unknown" if wrong[0] in sets else "missing"
            raise PlanError(f"placement: {what} worker group '{wrong[0]}'; the groups are {', '.join(groups)}")
        if empty := [name for name, own in sets.items() if not own]:
            raise PlanError(f"placement: worker group '{empty[0]}' has no devices")
        last = max(device for own in sets.values() for device in own)
        available = device_sets(last + 1 if devices is None else devices, memory_per_device)
        if last >= (count := sum(s.count for s in available)):
            raise PlanError(f"placement: device {last} does not exist; there are {count}, numbered from 0")
        return _plan(flow, profile, available, items, "best", sets)

    def with_groups(self, loop: str, groups: int) -> Plan:
        """The same plan with another number S of pipeline groups in a loop; `repriced` gives it its times."""

        def walk(node: PlanNode) -> PlanNode:
            if not isinstance(node, Leaf):
                return replace(node, parts=tuple(walk(part) for part in node.parts))
            if node.loop is None or node.stage != loop:
                return node
            return replace(node, loop=replace(node.loop, groups=groups))

        return replace(self, root=walk(self.root))

    def repriced(self, profile: Profile) -> Plan:
        """The same plan with the times of another profile (for example newer measurements); switches stay."""
        kinds = np.repeat(np.arange(len(self.devices)), [s.count for s in self.devices])

        def call(stage: str, items: float, devices: Devices) -> float:
            speed = min(self.devices[kinds[device]].speed_of(stage) for device in devices)
            return float(profile.model(stage).seconds(items, len(devices))) / speed

        def walk(node: PlanNode) -> PlanNode:
            if not isinstance(node, Leaf):
                return replace(node, parts=tuple(walk(part) for part in node.parts))
            if node.loop is None:
                return replace(node, call_s=call(node.stage, node.items, node.devices))
            own = node.loop
            items = node.items / own.waves / own.groups
            times = call(own.first, items, own.first_devices), call(own.second, items, own.second_devices)
            shares = (
                float(profile.model(own.first).busy_share(len(own.first_devices))),
                float(profile.model(own.second).busy_share(len(own.second_devices))),
            )
            hop = profile.hops.get(node.stage, 0.0)
            shape = replace(
                own, first_s=times[0], second_s=times[1], first_busy=shares[0], second_busy=shares[1], hop_s=hop
            )
            return replace(node, loop=shape, call_s=shape.seconds)

        return replace(self, root=walk(self.root), overhead_s=profile.overhead_s)

    def to_yaml(self) -> str:
        return plan_text.to_yaml(self.flow, self.items, self.devices, self.root, self.resident_bytes, self.overhead_s)

    @classmethod
    def from_yaml(cls, text: str) -> Plan:
        """Raises ValueError for a text that `to_yaml` did not write."""
        return cls(*plan_text.from_yaml(text))

    def gantt(self, width: int = 72) -> str:
        """The predicted timeline as text."""
        return gantt_text(simulate(self), width)

    def gantt_svg(self) -> str:
        """The predicted timeline as an SVG document."""
        return gantt_svg(simulate(self), f"{self.flow}: {self.items} items, {self.predicted_s:.4g} s predicted")

    def __str__(self) -> str:
        return "\n".join([self._title(), *plan_text.tree_lines(self.root, "  ")])

    def __rich__(self) -> Tree:
        return plan_text.rich_tree(self._title(), self.root)

    def _title(self) -> str:
        there = " + ".join(f"{s.count} {s.kind}" for s in self.devices)
        idle = f"{100 * self.idle_share:.0f} % idle"
        return f"plan of {self.flow}: {self.items} items on {there}: {self.predicted_s:.4g} s predicted, {idle}"


def make_plan(
    flow: Flow,
    profile: Profile,
    devices: int | Sequence[Any] | Any,
    items: int,
    memory_per_device: int | None = None,
    style: Style = "best",
) -> Plan:
    """The fastest plan of an iteration of `items` items.

    Args:
        devices: how many; or a list of (kind, count) or `DeviceSet`; or a started `Cluster`.
        memory_per_device: bytes on each device, for device sets that do not say; None: memory is no constraint.
        style: "collocated": stages only take turns; "disaggregated": every group on devices of its own.

    Raises PlanError if there is none, FlowError for an invalid flow, ProfileError for a stage that was not measured.
    """
    flow.validate()
    return _plan(flow, profile, device_sets(devices, memory_per_device), items, style, None)


def device_sets(devices: int | Sequence[Any] | Any, memory_per_device: int | None = None) -> tuple[DeviceSet, ...]:
    """What `make_plan` takes as devices, in one form."""
    if isinstance(devices, int | np.integer):
        sets: list[DeviceSet] = [DeviceSet("device", int(devices))]
    elif hasattr(devices, "devices"):
        kinds = [device.kind for device in devices.devices]
        sets = [DeviceSet(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds)]
    else:
        sets = [d if isinstance(d, DeviceSet) else DeviceSet(str(d[0]), int(d[1])) for d in devices]
    if not sets or any(s.count < 1 for s in sets):
        raise PlanError(f"there are no devices in {devices!r}")
    return tuple(replace(s, memory=memory_per_device) if s.memory is None else s for s in sets)


def granularities(items: int, most: int = MOST_GRANULARITIES) -> list[int]:
    """Divisors of `items`, ascending; if there are more than `most`, those closest to a geometric sequence."""
    divisors = [d for d in range(1, items + 1) if items % d == 0]
    if len(divisors) <= most:
        return divisors
    steps = np.geomspace(1, items, most)
    nearest = {int(np.abs(np.log(divisors) - np.log(step)).argmin()) for step in steps}
    return [divisors[place] for place in sorted(nearest)]


def _plan(
    flow: Flow,
    profile: Profile,
    sets: tuple[DeviceSet, ...],
    items: int,
    style: Style,
    placement: Mapping[str, Devices] | None,
) -> Plan:
    if items < 1:
        raise PlanError(f"{items} items: an iteration has at least 1")
    nodes = flow.stages()
    graph = _graph(nodes)
    batches = granularities(items)
    costs = Costs(profile, sets, batches, style)
    space: Space = Fixed(costs, placement) if placement is not None else Grid(costs, nodes, _steps(sets))
    search = Search(nodes, graph, space, batches, profile.switches, style)
    root = search.solve()
    if root is None and placement is None and style != "collocated" and _reuses_groups(nodes):
        # the grid lets groups that work more than once share all devices, where they may not fit beside each other
        fixed_spaces = (Fixed(costs, apart) for apart in _apart(flow.groups(), sum(s.count for s in sets)))
        roots = [Search(nodes, graph, space, batches, profile.switches, style).solve() for space in fixed_spaces]
        root = min((found for found in roots if found), key=lambda found: found.seconds, default=None)
    if root is None:
        raise PlanError(_why_not(flow, search, sets, style))
    resident = {group: profile.resident_bytes.get(group, 0) for group in flow.groups()}
    plan = Plan(flow.name, items, sets, root, resident, profile.overhead_s)
    if placement is None and style == "best" and (any(s.memory for s in sets) or _reuses_groups(nodes)):
        # knowing where each group is, more orders are possible, and memory counts for the very devices
        fixed = Search(nodes, graph, Fixed(costs, plan.placement), batches, profile.switches).solve()
        plan = min(plan, plan if fixed is None else replace(plan, root=fixed), key=lambda p: p.predicted_s)
    return plan


def _reuses_groups(nodes: Sequence[Node]) -> bool:
    groups = [group for node in nodes for group in node.groups]
    return len(set(groups)) < len(groups)


def _apart(groups: Sequence[str], count: int) -> Iterator[dict[str, Devices]]:
    """Placements of some groups on the first devices and of all others on the rest."""
    for mask in range(1, 2 ** (len(groups) - 1)):
        first = {group for place, group in enumerate(groups) if mask >> place & 1}
        for devices in useful_counts(count, (), SMALL_GRID)[1:-1].tolist():
            sides = tuple(range(devices)), tuple(range(devices, count))
            yield {group: sides[group not in first] for group in groups}


def _graph(nodes: Sequence[Node]) -> Graph:
    return Graph([sum(1 << nodes.index(i) for i in node.inputs if i.kind != "source") for node in nodes])


def _steps(sets: Iterable[DeviceSet]) -> int:
    """Fewer counts of each kind if there are several kinds, whose combinations multiply."""
    return SMALL_GRID if len(list(sets)) == 1 else 8


def _why_not(flow: Flow, search: Search, sets: Sequence[DeviceSet], style: Style) -> str:
    there = ", ".join(f"{s.count} {s.kind} with {_size(s.capacity)}" for s in sets)
    reasons: list[str] = []
    for node, options in zip(search.nodes, search.options, strict=True):
        nothing = np.zeros((2, 1))
        if np.isfinite(options.feasible_seconds(nothing)).any():
            continue
        if not np.isfinite(options.seconds).any():
            if style == "disaggregated" and node.kind == "loop":
                continue
            reasons.append(f"{node.name} can run on none of the devices with any of its batch sizes")
            continue
        over = np.where(np.isfinite(options.seconds), (options.need - options.capacity[:, None]).max(axis=0), np.inf)
        b, a = np.unravel_index(int(over.argmin()), over.shape)
        worst = int((options.need[:, b, a] - options.capacity[:, a]).argmax())
        count = int(options.count[worst, a])
        reasons.append(
            f"{node.calls[worst].name} needs {_size(float(options.need[worst, b, a]))} on each of {count} devices for "
            f"{search.batches[b]} items, the least of all ways; a device has {_size(float(options.capacity[worst, a]))}"
        )
    if not reasons:
        holders = [g for g in search.all.groups if search.space.costs.resident(g)]
        stuck = [g for g in holders if g not in search.all.switches]
        total = sum(search.space.costs.resident(g) for g in holders)
        if total and any(s.memory for s in sets):
            held = ", ".join(f"{g} {_size(search.space.costs.resident(g))}" for g in holders)
            reasons.append(
                f"the stages fit one by one but not together: idle groups hold {held} ({_size(total)} in all)"
            )
            if stuck:
                reasons.append(f"no offload and onload was measured for {', '.join(stuck)}, so they cannot be swapped")
        if style == "disaggregated":
            reasons.append(f"{len(search.all.groups)} groups cannot each have devices of their own")
    lines = "\n".join(f"  {reason}" for reason in reasons or ["no arrangement of its stages is possible"])
    return f"no {'' if style == 'best' else style + ' '}plan for flow '{flow.name}' on {there}:\n{lines}"


def _size(bytes_: float) -> str:
    if bytes_ == float("inf"):
        return "any memory"
    return f"{bytes_ / 2**30:.2f} GiB" if bytes_ >= 2**20 else f"{bytes_:.0f} bytes"


@dataclass(frozen=True)
class Comparison:
    """Plans side by side; a style that is not possible has the reason instead."""

    plans: dict[str, Plan | PlanError]

    @property
    def best(self) -> Plan:
        return min((p for p in self.plans.values() if isinstance(p, Plan)), key=lambda plan: plan.predicted_s)

    def __str__(self) -> str:
        lines = [f"{'plan':<15} {'seconds':>10} {'x best':>7} {'idle':>6}  placement"]
        for style, plan in self.plans.items():
            if isinstance(plan, Plan):
                ratio = plan.predicted_s / self.best.predicted_s if self.best.predicted_s else 1.0
                line = f"{plan.predicted_s:>10.4g} {ratio:>7.2f} {100 * plan.idle_share:>4.0f} %  {plan.placement_text}"
            else:
                line = f"{'-':>10} {'':>7} {'':>6}  {str(plan).splitlines()[-1].strip()}"
            lines.append(f"{style:<15} {line}")
        return "\n".join(lines)


def compare(
    flow: Flow,
    profile: Profile,
    devices: int | Sequence[Any] | Any,
    items: int,
    memory_per_device: int | None = None,
) -> Comparison:
    """The best plan beside the best collocated and the best disaggregated one; arguments as in `make_plan`.

    Raises PlanError if no plan at all is possible.
    """
    plans: dict[str, Plan | PlanError] = {}
    styles: tuple[Style, ...] = ("collocated", "disaggregated", "best")
    for style in styles:
        try:
            plans[style] = make_plan(flow, profile, devices, items, memory_per_device, style)
        except PlanError as error:
            if style == "best":
                raise
            plans[style] = error
    return Comparison(plans)
