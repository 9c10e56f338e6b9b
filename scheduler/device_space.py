"""The device sets that a search may give to stages, and what each stage costs on them.

`Grid` offers counts of interchangeable devices, of one kind or several; `Fixed` the sets of a hand-written placement.
Both list for each stage its *alternatives*: how it may run, on what, how long and with how much memory. The search over
trees is in `placement_search.py`.

Array axes: B batch sizes, A alternatives, G device sets of the space, W ways to split a set.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler.flow import Node
from scheduler.plan_tree import Devices, Leaf, LoopShape, loop_seconds
from scheduler.profile import Floats, Profile

Style = Literal["best", "collocated", "disaggregated"]
LOOP_GROUPS = (1, 2, 3, 4, 5, 6, 8)
Ints = NDArray[np.int64]


class PlanError(ValueError):
    """No plan is possible; the message says which stage needs what, and what there is."""


@dataclass(frozen=True)
class DeviceSet:
    """Devices of one kind.

    Attributes:
        memory: bytes on each device; None: not a constraint.
        speed: by stage ("group.method") or "*": how many times faster than profiled; 0: cannot run there.
    """

    kind: str
    count: int
    memory: int | None = None
    speed: Mapping[str, float] = field(default_factory=dict)

    def speed_of(self, stage: str) -> float:
        return self.speed.get(stage, self.speed.get("*", 1.0))

    @property
    def capacity(self) -> float:
        return float("inf") if self.memory is None else float(self.memory)


@dataclass(frozen=True)
class Alternatives:
    """Ways to run one node. The second of each pair is of a loop's second stage; its count is 0 if there is none or if
    it shares the devices of the first.

    Attributes:
        footprint: [A] index of the device set that is used up.
        kind, count, capacity: [2, A] which devices, how many, bytes on each.
        groups: [A] pipeline groups S.
        seconds: [B, A] of one call with that batch; inf where impossible.
        call_s: [2, B, A] one call of each stage (of a loop: for one group).
        need: [2, B, A] peak bytes of each stage, and of what shares its device inside the node.
    """

    footprint: Ints
    kind: Ints
    count: Ints
    groups: Ints
    seconds: Floats
    call_s: Floats
    need: Floats
    capacity: Floats

    def feasible_seconds(self, pinned: Floats) -> Floats:
        """[B, A] seconds, inf where memory does not suffice beside the `pinned` bytes [2, A]."""
        fits = (self.need + pinned[:, None, :] <= self.capacity[:, None, :]).all(axis=0)
        return np.where(fits, self.seconds, np.inf)


class Space(Protocol):
    """What the search knows of devices. `first[g], second[g]` [W]: the ways to split set g; index `size` is none."""

    costs: Costs
    size: int
    first: Ints
    second: Ints

    def alternatives(self, node: Node) -> Alternatives: ...

    def may_split(self, first: frozenset[str], second: frozenset[str]) -> bool:
        """Whether these groups may be on disjoint devices."""
        ...

    def spread(self, seconds: Floats) -> Floats:
        """[..., G] -> [..., G]: the least seconds with any part of each set."""
        ...

    def within(self, outer: int) -> NDArray[np.bool_]:
        """[G] which sets are part of set `outer`."""
        ...

    def pinned_bytes(self, node: Node, pinned: frozenset[str]) -> Floats:
        """[2, 1]: bytes that other, pinned groups hold on the devices of the node."""
        ...

    def divide(self, devices: Devices, first: int, second: int) -> tuple[Devices, Devices]: ...

    def take(self, devices: Devices, group: str, kind: int, skip: int, count: int) -> Devices:
        """Which of `devices` a group gets: `count` of a kind after the first `skip`."""
        ...


class Costs:
    """Seconds and memory of the calls of a flow's nodes at the batch sizes of a search."""

    def __init__(
        self, profile: Profile, sets: Sequence[DeviceSet], batches: Sequence[int], style: Style = "best"
    ) -> None:
        self.profile, self.sets, self.batches = profile, sets, np.array(batches, dtype=np.int64)
        self.style = style

    def resident(self, group: str) -> int:
        return self.profile.resident_bytes.get(group, 0)

    def seconds(self, stage: str, items: Floats, count: Ints, kind: Ints) -> Floats:
        speed = np.array([s.speed_of(stage) for s in self.sets])[kind]
        base = self.profile.model(stage).seconds(items, np.maximum(count, 1))
        return np.divide(base, speed, out=np.full(base.shape, np.inf), where=speed > 0)

    def peak(self, stage: str, group: str, items: ArrayLike, count: ArrayLike) -> Floats:
        """Peak bytes of a stage on each device; at least what its group holds while idle."""
        return np.maximum(self.profile.model(stage).memory_bytes(items, np.maximum(count, 1)), self.resident(group))

    def stage(self, node: Node, kind: Ints, count: Ints, footprint: Ints) -> Alternatives:
        """Alternatives of a stage; arguments [A]."""
        name, group = node.name, node.groups[0]
        items = self.batches[:, None].astype(np.float64)
        seconds = np.where(self._allowed(node)[:, None], self.seconds(name, items, count, kind), np.inf)
        need = self.peak(name, group, items, count)
        zero = np.zeros_like(need)
        capacity = self._capacity(kind)
        ones = np.ones(len(kind), dtype=np.int64)
        kinds, counts = np.stack([kind, kind]), np.stack([count, 0 * ones])
        two, needs = np.stack([seconds, zero]), np.stack([need, zero])
        capacities = np.stack([capacity, np.full_like(capacity, np.inf)])
        return Alternatives(footprint, kinds, counts, ones, seconds, two, needs, capacities)

    def pays_to_share(self, node: Node) -> bool:
        """Whether the stages of a loop on the same devices gain from several groups: idle cores or time on the way."""
        used = min(float(share) for call in node.calls for share in self.profile.model(call.name).busy.values())
        return used < 1.0 or self.profile.hops.get(node.name, 0.0) > 0.0

    def loop(
        self, node: Node, kind: Ints, count: Ints, groups: Ints, footprint: Ints, overlap: bool = False
    ) -> Alternatives:
        """Alternatives of a loop; kind and count [2, A], the rest [A].

        Count 0 of the second stage: it has the same devices as the first. `overlap`: they have some in common.
        """
        first, second = node.calls
        shares = count[1] == 0
        counts = np.where(shares, count[0], count)
        kinds = np.where(shares, kind[0], kind)
        at_once = self.batches if node.items is None else np.minimum(self.batches, node.items)
        waves = -(-self.batches // at_once)
        in_group = (self.batches / waves)[:, None] / groups
        e = self.seconds(first.name, in_group, counts[0], kinds[0])
        p = self.seconds(second.name, in_group, counts[1], kinds[1])
        with np.errstate(invalid="ignore"):
            busy = [self.profile.model(call.name).busy_share(counts[i]) for i, call in enumerate(node.calls)]
            common = np.where(shares | overlap, e * busy[0] + p * busy[1], 0.0)
            hop = self.profile.hops.get(node.name, 0.0)
            each = loop_seconds(node.steps, groups, e, p, common, hop)
            seconds: Floats = each * waves[:, None].astype(np.float64)
        if self.style == "disaggregated" and len(node.groups) > 1:
            seconds = np.where(shares | overlap, float("inf"), seconds)
        whole = (groups == 1) | (in_group % node.granularity == 0) & (in_group >= 1)
        whole &= np.isin(groups, node.pipeline or LOOP_GROUPS)
        seconds = np.where(whole & self._allowed(node)[:, None] & np.isfinite(e + p), seconds, float("inf"))
        own = [self.peak(call.name, call.group, in_group * groups, counts[i]) for i, call in enumerate(node.calls)]
        other = [self.resident(call.group) if first.group != second.group else 0 for call in (second, first)]
        together = np.maximum(own[0] + other[0], own[1] + other[1])
        need = np.stack(
            [np.where(shares | overlap, together, own[0]), np.where(shares, 0.0, together if overlap else own[1])]
        )
        capacity = np.stack([self._capacity(kinds[0]), np.where(shares, np.inf, self._capacity(kinds[1]))])
        return Alternatives(footprint, kinds, count, groups, seconds, np.stack([e, p]), need, capacity)

    def shape(
        self, node: Node, first: Devices, second: Devices, waves: int, groups: int, first_s: float, second_s: float
    ) -> LoopShape:
        names = (node.calls[0].name, node.calls[1].name)
        busy = [
            float(self.profile.model(name).busy_share(len(devices)))
            for name, devices in zip(names, (first, second), strict=True)
        ]
        hop = self.profile.hops.get(node.name, 0.0)
        times = (first_s, second_s, busy[0], busy[1], hop)
        return LoopShape(*names, first, second, node.steps, waves, groups, *times)

    def _allowed(self, node: Node) -> NDArray[np.bool_]:
        """[B] a gathering stage takes the whole iteration, others multiples of their granularity."""
        whole = self.batches == self.batches[-1]
        return whole if node.gather else whole | (self.batches % node.granularity == 0)

    def _capacity(self, kind: Ints) -> Floats:
        return np.array([s.capacity for s in self.sets])[kind]


def useful_counts(count: int, measured: Sequence[int], steps: int) -> Ints:
    """Device counts to try, with 0: all of them if few, else powers of two, what they leave over, `steps` equal steps,
    and the measured counts."""
    if count <= steps:
        return np.arange(count + 1)
    powers = [1 << k for k in range(count.bit_length()) if 1 << k < count]
    equal = [count * k // min(steps, 8) for k in range(1, min(steps, 8) + 1)]
    left = [count - power for power in powers]
    return np.array(sorted({0, *powers, *equal, *left, *(m for m in measured if m <= count)}))


class Grid:
    """Counts of devices of each kind; a set is a vector of counts, all smaller vectors are part of it."""

    def __init__(self, costs: Costs, nodes: Sequence[Node], steps: int) -> None:
        self.costs, sets = costs, costs.sets
        names = [node.name if node.kind == "stage" else call.name for node in nodes for call in node.calls]
        measured = sorted({count for name in names for count in costs.profile.model(name).time})
        self.values = [useful_counts(s.count, measured, steps) for s in sets]
        self.shape = tuple(len(values) for values in self.values)
        self.size = int(np.prod(self.shape))
        self.vectors = np.array(list(itertools.product(*self.values)))
        self.offsets = np.cumsum([0, *(s.count for s in sets)])
        left = self.vectors[:, None, :] - self.vectors[None, :, :]
        rest = np.zeros(left.shape[:2], dtype=np.int64)
        for k, values in enumerate(self.values):
            place = np.searchsorted(values, np.maximum(left[:, :, k], 0), side="right") - 1
            rest = rest * self.shape[k] + place
        possible = (left >= 0).all(axis=2) & (rest > 0)
        possible[:, 0] = False
        ways = max(1, int(possible.sum(axis=1).max()))
        order = np.argsort(~possible, axis=1, kind="stable")[:, :ways]
        usable = np.take_along_axis(possible, order, axis=1)
        self.first = np.where(usable, order, self.size)
        self.second = np.where(usable, np.take_along_axis(rest, order, axis=1), self.size)

    def alternatives(self, node: Node) -> Alternatives:
        kinds = range(len(self.values))
        alone = [(k, int(c)) for k in kinds for c in self.values[k] if c]
        if node.kind == "stage":
            kind, count = np.array(alone).T
            return self.costs.stage(node, kind, count, self._index([{k: c} for k, c in alone]))
        pipeline = node.pipeline or LOOP_GROUPS
        alternating = pipeline if self.costs.pays_to_share(node) else pipeline[:1]
        ways: list[tuple[int, int, int, int, int]] = [(k, c, k, 0, s) for k, c in alone for s in alternating]
        if self.costs.style != "collocated" and len(node.groups) > 1:
            pairs = [
                (k, int(c), k, int(n - c)) for k in kinds for n in self.values[k] for c in self.values[k] if 0 < c < n
            ]
            pairs += [(k, c, j, d) for k, c in alone for j, d in alone if j != k]
            ways += [(*pair, s) for pair in pairs for s in pipeline]
        k1, c1, k2, c2, groups = np.array(ways).T
        used = [{k: c, j: d} if j != k else {k: c + d} for k, c, j, d, _ in ways]
        return self.costs.loop(node, np.stack([k1, k2]), np.stack([c1, c2]), groups, self._index(used))

    def may_split(self, first: frozenset[str], second: frozenset[str]) -> bool:
        return not first & second

    def spread(self, seconds: Floats) -> Floats:
        shaped = seconds.reshape(*seconds.shape[:-1], *self.shape)
        for axis in range(-len(self.shape), 0):
            shaped = np.minimum.accumulate(shaped, axis=axis)
        return shaped.reshape(seconds.shape)

    def within(self, outer: int) -> NDArray[np.bool_]:
        return (self.vectors <= self.vectors[outer]).all(axis=1)

    def pinned_bytes(self, node: Node, pinned: frozenset[str]) -> Floats:
        return np.full((2, 1), float(sum(self.costs.resident(group) for group in pinned - set(node.groups))))

    def divide(self, devices: Devices, first: int, second: int) -> tuple[Devices, Devices]:
        parts: list[list[int]] = [[], []]
        for k in range(len(self.values)):
            mine = self._of_kind(devices, k)
            a, b = int(self.vectors[first][k]), int(self.vectors[second][k])
            parts[0] += mine[:a]
            parts[1] += mine[a : a + b]
        return tuple(parts[0]), tuple(parts[1])

    def take(self, devices: Devices, group: str, kind: int, skip: int, count: int) -> Devices:
        return tuple(self._of_kind(devices, kind)[skip : skip + count])

    def _of_kind(self, devices: Devices, kind: int) -> list[int]:
        return [d for d in devices if self.offsets[kind] <= d < self.offsets[kind + 1]]

    def _index(self, used: Sequence[Mapping[int, int]]) -> Ints:
        """[A] indices of the sets with these counts by kind."""
        index = np.zeros(len(used), dtype=np.int64)
        for k, values in enumerate(self.values):
            index = index * self.shape[k] + np.searchsorted(values, [counts.get(k, 0) for counts in used])
        return index


class Fixed:
    """The device sets of a placement: one set for everything, in which each group has its place."""

    def __init__(self, costs: Costs, placement: Mapping[str, Devices]) -> None:
        self.costs, self.placement, self.size = costs, placement, 1
        self.first = self.second = np.zeros((1, 1), dtype=np.int64)
        ends = np.cumsum([s.count for s in costs.sets])
        self.kinds = {
            group: int(max(np.searchsorted(ends, d, side="right") for d in set_)) for group, set_ in placement.items()
        }

    def alternatives(self, node: Node) -> Alternatives:
        sets = [self.placement[call.group] for call in node.calls]
        kind = np.array([[self.kinds[call.group]] for call in node.calls])
        count = np.array([[len(devices)] for devices in sets])
        footprint = np.zeros(1, dtype=np.int64)
        if node.kind == "stage":
            return self.costs.stage(node, kind[0], count[0], footprint)
        groups = np.array(node.pipeline or LOOP_GROUPS)
        wide = np.ones_like(groups)
        if set(sets[0]) == set(sets[1]):
            kind, count = np.repeat(kind[:1], 2, 0), np.array([count[0], [0]])
            return self.costs.loop(node, kind * wide, count * wide, groups, 0 * wide)
        overlap = bool(set(sets[0]) & set(sets[1]))
        return self.costs.loop(node, kind * wide, count * wide, groups, 0 * wide, overlap)

    def may_split(self, first: frozenset[str], second: frozenset[str]) -> bool:
        on_first = {device for group in first for device in self.placement[group]}
        return not any(device in on_first for group in second for device in self.placement[group])

    def spread(self, seconds: Floats) -> Floats:
        return seconds

    def within(self, outer: int) -> NDArray[np.bool_]:
        return np.ones(1, dtype=bool)

    def pinned_bytes(self, node: Node, pinned: frozenset[str]) -> Floats:
        held = []
        for call in (node.calls[0], node.calls[-1]):
            own = set(self.placement[call.group])
            others = [g for g in pinned - set(node.groups) if own & set(self.placement[g])]
            held.append([float(sum(self.costs.resident(group) for group in others))])
        return np.array(held)

    def divide(self, devices: Devices, first: int, second: int) -> tuple[Devices, Devices]:
        return devices, devices

    def take(self, devices: Devices, group: str, kind: int, skip: int, count: int) -> Devices:
        return self.placement[group]


def make_leaf(space: Space, node: Node, options: Alternatives, b: int, a: int, items: int, devices: Devices) -> Leaf:
    """The leaf of alternative `a` at batch index `b`, on its part of `devices`."""
    groups = tuple(call.group for call in node.calls)
    (kind, other_kind), (count, other_count) = options.kind[:, a].tolist(), options.count[:, a].tolist()
    first = space.take(devices, groups[0], kind, 0, count)
    call_s = float(options.seconds[b, a])
    if node.kind == "stage":
        return Leaf(node.name, items, first, call_s, (node.name,), groups, (int(options.need[0, b, a]),))
    second = first
    if other_count:
        second = space.take(devices, groups[1], other_kind, count if other_kind == kind else 0, other_count)
    waves = 1 if node.items is None else -(-items // node.items)
    e, p = options.call_s[:, b, a].tolist()
    members = (node.calls[0].name, node.calls[1].name)
    shape = space.costs.shape(node, first, second, waves, int(options.groups[a]), e, p)
    at_once, counts = np.float64(-(-items // waves)), np.array([len(first), len(second)])
    own = (space.costs.peak(call.name, call.group, at_once, counts[i]) for i, call in enumerate(node.calls))
    together = tuple(sorted({*first, *second}))
    return Leaf(node.name, items, together, call_s, members, groups, tuple(int(bytes_) for bytes_ in own), shape)
