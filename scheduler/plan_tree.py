"""The tree of a plan: leaves run stages, inner nodes run their parts in turn or as a pipeline. Closed-form costs.

`seconds` of a node is the time it takes for all the items that enter it at once:

    leaf        one call of the stage; a loop: see `LoopShape`
    temporal    sum of the parts, on the same devices one after another
    spatial     critical + (M / m - 1) * bottleneck, parts on disjoint devices, M items in chunks of m
                (RLinf, arXiv 2509.15965); critical: the longest path through the parts for one chunk,
                bottleneck: the slowest part for one chunk

each plus what it takes to bring the worker groups in `moved` onto the devices before (`onload_s`) and to move them off
after (`offload_s`), if another part of a temporal node needs the memory. Times are seconds, memory is bytes on one
device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

Devices = tuple[int, ...]


def loop_seconds(
    steps: int,
    groups: ArrayLike,
    first_s: ArrayLike,
    second_s: ArrayLike,
    shared_s: ArrayLike = 0.0,
    hop_s: ArrayLike = 0.0,
) -> NDArray[np.float64]:
    """Seconds of a cyclic pair; arguments broadcast.

    With S groups of N/S items, calls of e = `first_s` and p = `second_s` seconds and h = `hop_s` seconds on the way
    there and back, a round costs R = max(S e, S p, e + p + h); the last group of the last round still has to go through
    both stages, so T rounds take (T - 1) R + max(S e + p, e + S p) + h. Exact for constant times (`simulate.loop_calls`
    gives the same). Where both stages use a device, a round also takes at least the S * `shared_s` seconds for which
    one group keeps it busy: e + p where each has the device to itself while it works, less for processes that
    share cores and have threads for only some of them.
    """
    s, e, p, shared, hop = (np.asarray(x, dtype=np.float64) for x in (groups, first_s, second_s, shared_s, hop_s))
    contended = s * shared
    rounds = np.maximum(np.maximum(np.maximum(s * e, s * p), e + p + hop), contended)
    return (steps - 1) * rounds + np.maximum(np.maximum(s * e + p, e + s * p) + hop, contended)


@dataclass(frozen=True)
class LoopShape:
    """How a loop runs: `waves` times `steps` rounds, the items of a wave cut into `groups` that alternate.

    `first_s` and `second_s` are the seconds of one call for one group, `first_busy` and `second_busy` the share of
    their devices that they keep busy meanwhile, `hop_s` what a round's messages spend on the way.
    """

    first: str
    second: str
    first_devices: Devices
    second_devices: Devices
    steps: int
    waves: int
    groups: int
    first_s: float
    second_s: float
    first_busy: float = 1.0
    second_busy: float = 1.0
    hop_s: float = 0.0

    @property
    def shared(self) -> bool:
        return bool(set(self.first_devices) & set(self.second_devices))

    @property
    def shared_s(self) -> float:
        """Seconds for which one group keeps a device busy that both stages use; 0 if there is none."""
        return self.first_s * self.first_busy + self.second_s * self.second_busy if self.shared else 0.0

    @property
    def seconds(self) -> float:
        each = loop_seconds(self.steps, self.groups, self.first_s, self.second_s, self.shared_s, self.hop_s)
        return self.waves * float(each)


@dataclass(frozen=True)
class Leaf:
    """One stage or loop on its devices. `call_s` is one call with `items` items.

    `memory_bytes` and `members` have one entry for each worker method: a stage has one, a loop two.
    """

    stage: str
    items: int
    devices: Devices
    call_s: float
    members: tuple[str, ...]
    groups: tuple[str, ...]
    memory_bytes: tuple[int, ...]
    loop: LoopShape | None = None
    onload_s: float = 0.0
    offload_s: float = 0.0
    moved: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.onload_s + self.call_s + self.offload_s

    @property
    def placed(self) -> list[tuple[str, str, Devices, int]]:
        """(method, group, devices, peak bytes on each of them) of each worker method."""
        if self.loop is None:
            return [(self.members[0], self.groups[0], self.devices, self.memory_bytes[0])]
        sets = (self.loop.first_devices, self.loop.second_devices)
        return list(zip(self.members, self.groups, sets, self.memory_bytes, strict=True))

    @property
    def busy(self) -> float:
        """Device-seconds of work in one call."""
        if self.loop is None:
            return self.call_s * len(self.devices)
        shape = self.loop
        calls = shape.waves * shape.steps * shape.groups
        first = shape.first_s * shape.first_busy * len(shape.first_devices)
        return calls * (first + shape.second_s * shape.second_busy * len(shape.second_devices))


@dataclass(frozen=True)
class Temporal:
    """Parts that run one after another, each on all the items. With `swap` they offload to make room for each other."""

    parts: tuple[PlanNode, ...]
    swap: bool = False
    onload_s: float = 0.0
    offload_s: float = 0.0
    moved: tuple[str, ...] = ()

    @cached_property
    def seconds(self) -> float:
        return self.onload_s + sum(part.seconds for part in self.parts) + self.offload_s

    @property
    def devices(self) -> Devices:
        return tuple(sorted({device for part in self.parts for device in part.devices}))


@dataclass(frozen=True)
class Spatial:
    """Parts on disjoint devices that pass chunks of `granularity` items on; `depends[i]`: whose chunks part i needs."""

    parts: tuple[PlanNode, ...]
    depends: tuple[tuple[int, ...], ...]
    items: int
    granularity: int
    onload_s: float = 0.0
    offload_s: float = 0.0
    moved: tuple[str, ...] = ()

    @property
    def chunks(self) -> int:
        return -(-self.items // self.granularity)

    @cached_property
    def critical_s(self) -> float:
        finish: list[float] = []
        for part, needed in zip(self.parts, self.depends, strict=True):
            finish.append(max((finish[i] for i in needed), default=0.0) + part.seconds)
        return max(finish)

    @property
    def bottleneck_s(self) -> float:
        return max(part.seconds for part in self.parts)

    @cached_property
    def seconds(self) -> float:
        return self.onload_s + self.critical_s + (self.chunks - 1) * self.bottleneck_s + self.offload_s

    @property
    def devices(self) -> Devices:
        return tuple(sorted({device for part in self.parts for device in part.devices}))


PlanNode = Leaf | Temporal | Spatial


def leaves(node: PlanNode) -> Iterator[Leaf]:
    """All leaves, in the order in which they first work."""
    if isinstance(node, Leaf):
        yield node
    else:
        for part in node.parts:
            yield from leaves(part)


def busy_seconds(node: PlanNode) -> float:
    """Device-seconds of work (switches not counted) for the items that enter the node."""
    if isinstance(node, Leaf):
        return node.busy
    once = sum(busy_seconds(part) for part in node.parts)
    return once * node.chunks if isinstance(node, Spatial) else once


def moved_groups(node: PlanNode) -> set[str]:
    """The worker groups that the node or a part of it offloads when it is done."""
    below = set() if isinstance(node, Leaf) else {group for part in node.parts for group in moved_groups(part)}
    return below | set(node.moved)


def groups_by_device(node: PlanNode) -> dict[int, set[str]]:
    """Which worker groups each device of the node hosts."""
    hosted: dict[int, set[str]] = {}
    for leaf in leaves(node):
        for _, group, devices, _ in leaf.placed:
            for device in devices:
                hosted.setdefault(device, set()).add(group)
    return hosted


def peak_memory(node: PlanNode, resident: Mapping[str, int]) -> dict[int, int]:
    """Most bytes in use at any time on each device of the plan.

    While a stage runs, its device holds the stage's own peak and the resident bytes of every other group that lives
    there and was not swapped out.
    """
    peak: dict[int, int] = {}

    def walk(node: PlanNode, staying: Mapping[int, Collection[str]]) -> None:
        if isinstance(node, Leaf):
            local = groups_by_device(node)
            for _, group, devices, needed in node.placed:
                for device in devices:
                    others = (set(staying.get(device, ())) | local[device]) - {group}
                    total = needed + sum(resident.get(other, 0) for other in others)
                    peak[device] = max(peak.get(device, 0), total)
            return
        hosted = [groups_by_device(part) for part in node.parts]
        for part, own in zip(node.parts, hosted, strict=True):
            beside = {device: set(groups) for device, groups in staying.items()}
            for place, other in enumerate(hosted):
                if other is not own and isinstance(node, Temporal):
                    gone = moved_groups(node.parts[place]) if node.swap else set()
                    for device, groups in other.items():
                        beside.setdefault(device, set()).update(groups - gone)
            walk(part, beside)

    walk(node, {})
    return peak


def device_text(devices: Devices) -> str:
    """Device numbers as a placement writes them: "0-3,6"."""
    ranges: list[list[int]] = []
    for device in sorted(devices):
        if ranges and device == ranges[-1][1] + 1:
            ranges[-1][1] = device
        else:
            ranges.append([device, device])
    return ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in ranges)
