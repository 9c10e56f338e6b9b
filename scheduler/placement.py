"""Which devices each worker group uses, written as a short string.

    "actor, rollout, env: all"            every group on every device, taking turns (collocated)
    "env: 0; rollout, actor: 1"           groups on devices of their own (disaggregated)
    "env: 0-3; rollout: 4-7; actor: all"  a hybrid of both
    "actor: 0-7/2"                        two devices for each rank, so four ranks

On GPUs a group has one rank for each device unless `/k` says otherwise. On a CPU the devices are slots (cores)
of one machine and a group is one process spanning all its slots, because cores, unlike GPUs, are shared by the
threads and child processes of one worker.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class PlacementError(ValueError):
    """A placement that cannot be honoured; the message is for the user."""


@dataclass(frozen=True)
class GroupPlacement:
    """Devices of one worker group; `ranks[r]` are the device indices of rank r."""

    group: str
    ranks: tuple[tuple[int, ...], ...]

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({device for rank in self.ranks for device in rank}))


def local_device_count(cpu_slots: int | None = None) -> tuple[int, Literal["cpu", "gpu"]]:
    """Devices of this machine, found without Ray: the GPUs that NVIDIA's driver lists, else CPU slots.

    Args:
        cpu_slots: count this many CPU slots, whatever else there is; None: GPUs if any, else the usable cores.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = Path("/proc/driver/nvidia/gpus")
    gpus = len(
        [g for g in visible.split(",") if g not in ("", "-1")] if visible is not None else list(driver.glob("*"))
    )
    if gpus and cpu_slots is None:
        return gpus, "gpu"
    return cpu_slots or len(os.sched_getaffinity(0)), "cpu"


def parse_placement(
    text: str, num_devices: int, groups: Sequence[str], kind: Literal["cpu", "gpu"] = "cpu"
) -> dict[str, GroupPlacement]:
    """Parse a placement string for exactly the given groups.

    Raises PlacementError naming the part at fault: an unknown, missing or repeated group, a device that does not
    exist, or devices that do not divide into ranks.
    """
    placed: dict[str, GroupPlacement] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        names_text, colon, devices_text = entry.partition(":")
        if not colon:
            raise PlacementError(f"'{entry}' has no ':'; expected for example 'actor, rollout: all'")
        ranks = _parse_ranks(devices_text.strip(), num_devices, kind)
        for name in (part.strip() for part in names_text.split(",")):
            if name not in groups:
                raise PlacementError(f"unknown worker group '{name}'; the groups are {', '.join(groups)}")
            if name in placed:
                raise PlacementError(f"worker group '{name}' is placed twice")
            placed[name] = GroupPlacement(name, ranks)
    if missing := [name for name in groups if name not in placed]:
        raise PlacementError(f"no devices given for {', '.join(missing)}")
    return {name: placed[name] for name in groups}


def _parse_ranks(text: str, num_devices: int, kind: str) -> tuple[tuple[int, ...], ...]:
    match = re.fullmatch(r"(.*?)(?:/\s*(\d+))?", text)
    assert match is not None  # the pattern matches any text
    devices = _parse_devices(match[1].strip(), num_devices)
    per_rank = int(match[2]) if match[2] else (1 if kind == "gpu" else len(devices))
    if per_rank < 1 or len(devices) % per_rank:
        raise PlacementError(f"'{text}': {len(devices)} devices do not divide into ranks of {per_rank}")
    return tuple(tuple(devices[i : i + per_rank]) for i in range(0, len(devices), per_rank))


def _parse_devices(text: str, num_devices: int) -> list[int]:
    if text == "all":
        return list(range(num_devices))
    devices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part.strip())
        if not match:
            raise PlacementError(f"'{part.strip()}' is not a device; expected 'all', '3', or '0-3'")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise PlacementError(f"'{part.strip()}' runs backwards")
        devices += range(first, last + 1)
    if beyond := [device for device in devices if device >= num_devices]:
        raise PlacementError(f"device {beyond[0]} does not exist; there are {num_devices}, numbered from 0")
    if len(set(devices)) != len(devices):
        raise PlacementError(f"'{text}' names a device twice")
    return devices
