"""Plans as text: the printed tree, placement strings, and YAML that reads back to the same plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from rich.markup import escape
from rich.tree import Tree

from scheduler.device_space import DeviceSet
from scheduler.plan_tree import Devices, Leaf, LoopShape, PlanNode, Spatial, Temporal, device_text

VERSION = 1


def describe(node: PlanNode) -> str:
    """One line on a node, without its parts."""
    switch = f"{node.onload_s + node.offload_s:.4g} s to bring in and move out {', '.join(node.moved)}"
    tail = f"{node.seconds:.4g} s" + (f", of it {switch}" if node.moved else "")
    if isinstance(node, Temporal):
        return f"in turn{', swapping' if node.swap else ''} on {device_text(node.devices)}: {tail}"
    if isinstance(node, Spatial):
        what = "one after another" if len(node.parts) == 1 else "as a pipeline"
        if node.chunks == 1:
            return f"side by side, {node.items} items at once: {tail}"
        return f"{what}, {node.chunks} chunks of {node.granularity}: {tail}"
    if node.loop is None:
        return f"{node.stage} on {device_text(node.devices)}, {node.items} items a call: {tail}"
    loop = node.loop
    waves = f"{loop.waves} waves of " if loop.waves > 1 else ""
    if loop.shared and loop.groups == 1:
        return f"{node.stage} on {device_text(node.devices)} by turns, {waves}{loop.steps} steps: {tail}"
    if loop.first_devices == loop.second_devices:
        return f"{node.stage} on {device_text(node.devices)}, S = {loop.groups}, {waves}{loop.steps} steps: {tail}"
    sets = f"{device_text(loop.first_devices)} and {device_text(loop.second_devices)}"
    return f"{node.stage} on {sets}, S = {loop.groups}, {waves}{loop.steps} steps: {tail}"


def tree_lines(node: PlanNode, indent: str = "") -> Iterator[str]:
    yield indent + describe(node)
    if not isinstance(node, Leaf):
        for part in node.parts:
            yield from tree_lines(part, indent + "  ")


def rich_tree(title: str, root: PlanNode) -> Tree:
    """The tree for `rich.print`."""
    tree = Tree(escape(title))

    def add(branch: Tree, node: PlanNode) -> None:
        below = branch.add(escape(describe(node)))
        if not isinstance(node, Leaf):
            for part in node.parts:
                add(below, part)

    add(tree, root)
    return tree


def placement_text(placement: Mapping[str, Devices]) -> str:
    """A placement string: "env: 0-3; rollout, actor: 4-7"."""
    together: dict[Devices, list[str]] = {}
    for group, devices in placement.items():
        together.setdefault(devices, []).append(group)
    return "; ".join(f"{', '.join(groups)}: {device_text(devices)}" for devices, groups in together.items())


def to_yaml(
    flow: str,
    items: int,
    devices: Sequence[DeviceSet],
    root: PlanNode,
    resident_bytes: Mapping[str, int],
    overhead_s: float,
) -> str:
    sets = [{"kind": s.kind, "count": s.count, "memory": s.memory, "speed": dict(s.speed)} for s in devices]
    content = {
        "version": VERSION,
        "flow": flow,
        "items": items,
        "predicted_s": root.seconds + overhead_s,
        "overhead_s": overhead_s,
        "devices": sets,
        "resident_bytes": dict(resident_bytes),
        "plan": _encode(root),
    }
    return yaml.safe_dump(content, sort_keys=False)


def from_yaml(text: str) -> tuple[str, int, tuple[DeviceSet, ...], PlanNode, dict[str, int], float]:
    """The arguments of `Plan`. Raises ValueError for anything that `to_yaml` did not write."""
    content = yaml.safe_load(text)
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"not a plan of version {VERSION}")
    try:
        sets = tuple(DeviceSet(**entry) for entry in content["devices"])
        root = _decode(content["plan"])
        overhead = content.get("overhead_s", 0.0)
        return content["flow"], content["items"], sets, root, content["resident_bytes"], overhead
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a whole plan: {error}") from error


def _encode(node: PlanNode) -> dict[str, Any]:
    moves = {"onload_s": node.onload_s, "offload_s": node.offload_s, "moved": list(node.moved)}
    switch: dict[str, Any] = moves if node.moved else {}
    if isinstance(node, Temporal):
        return {"in_turn": [_encode(part) for part in node.parts], "swap": node.swap, **switch}
    if isinstance(node, Spatial):
        depends = [list(needed) for needed in node.depends]
        size = {"items": node.items, "granularity": node.granularity, "depends": depends}
        return {"pipeline": [_encode(part) for part in node.parts], **size, **switch}
    entry: dict[str, Any] = {
        "stage": node.stage,
        "items": node.items,
        "devices": device_text(node.devices),
        "call_s": node.call_s,
        "members": list(node.members),
        "groups": list(node.groups),
        "memory_bytes": list(node.memory_bytes),
    }
    if node.loop is not None:
        loop = dict(vars(node.loop))
        sets = {key: device_text(loop[key]) for key in ("first_devices", "second_devices")}
        entry["loop"] = {**loop, **sets}
    return {**entry, **switch}


def _decode(entry: dict[str, Any]) -> PlanNode:
    switch = (entry.get("onload_s", 0.0), entry.get("offload_s", 0.0), tuple(entry.get("moved", ())))
    if "in_turn" in entry:
        return Temporal(tuple(_decode(part) for part in entry["in_turn"]), entry["swap"], *switch)
    if "pipeline" in entry:
        parts = tuple(_decode(part) for part in entry["pipeline"])
        depends = tuple(tuple(needed) for needed in entry["depends"])
        return Spatial(parts, depends, entry["items"], entry["granularity"], *switch)
    loop = None
    if "loop" in entry:
        sets = {key: _devices(entry["loop"][key]) for key in ("first_devices", "second_devices")}
        loop = LoopShape(**{**entry["loop"], **sets})
    members, groups, memory = (tuple(entry[key]) for key in ("members", "groups", "memory_bytes"))
    devices = _devices(entry["devices"])
    return Leaf(entry["stage"], entry["items"], devices, entry["call_s"], members, groups, memory, loop, *switch)


def _devices(text: str) -> Devices:
    found: list[int] = []
    for part in str(text).split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
