"""Measured cost of the stages of a flow: seconds and memory by batch size and device count.

`Sample` is one measured call, `CostModel` what is predicted from the samples of one stage, `Profile` the models of one
recipe on one machine with what switching costs. Nothing is measured here: `execute.py` adds samples as it runs.

How a `CostModel` predicts `seconds(items, devices)`:

1. Samples with equal (items, devices) become one point: the median of the seconds, the largest memory.
2. For each measured device count, points are ordered by load, `ceil(items / devices)`, the items of the busiest device;
   of devices that the stage did not keep busy (`Sample.busy`: one thread that has several cores) only those count
   that it would have needed.
   Isotonic regression (pool adjacent violators) makes the seconds non-decreasing in it; between points they are
   interpolated linearly. So the fixed cost of a call and the cost of each item are both in the curve.
3. Below the smallest load the first segment is continued (never under a proportional share, never under 0; a lone point
   counts as all fixed cost). Above the largest load the curve rises with the last segment's slope or the overall
   slope, whichever is steeper (a lone point: in proportion).
4. Between two measured device counts a power law joins the two predictions for the same items, which is monotone and
   keeps the measured efficiency. Beyond the largest and below the smallest count, time depends on the load alone (data
   parallelism at the efficiency of the nearest measured count; a fixed cost stays fixed: Amdahl's law). A stage that
   kept only some of its devices busy loses nothing by having fewer, as long as those suffice.

Memory follows the same rules with maxima for medians; below the smallest count it is scaled by `measured / devices`,
as if all of it were sharded, so that a plan is not accepted on a guess.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

KEEP = 5  # samples of one point (stage, items, devices) that count; older ones are forgotten
QUANTILES = 129


class ProfileError(ValueError):
    """A profile that lacks or contradicts something; the message names it."""


@dataclass(frozen=True)
class Sample:
    """One measured call of a stage.

    Attributes:
        items: items of the call, over all ranks.
        devices: devices the call ran on.
        seconds: from the call to the end of the slowest rank.
        memory_bytes: most memory that the stage's process held on one device, parameters included.
        busy: share of the devices' time that the call kept busy; less than 1 for a thread that has several cores.
        durations: seconds of the single items where they differ much (generation), else empty.
    """

    stage: str
    items: int
    devices: int
    seconds: float
    memory_bytes: int = 0
    durations: tuple[float, ...] = ()
    busy: float = 1.0

    def __post_init__(self) -> None:
        if self.items < 1 or self.devices < 1 or not 0 <= self.seconds < float("inf") or self.memory_bytes < 0:
            raise ProfileError(f"{self} is no measurement: items and devices are at least 1, the rest at least 0")
        if not 0 < self.busy <= 1:
            raise ProfileError(f"{self} is no measurement: busy is a share of the devices, above 0 and at most 1")


@dataclass(frozen=True)
class Curve:
    """A non-decreasing quantity at one device count, over the load (items on the busiest device)."""

    load: Floats
    value: Floats

    def at(self, load: Floats) -> Floats:
        """Values at any load >= 0, same shape; the module's rule 3 outside the measured range."""
        x, y = self.load, self.value
        inside = np.interp(load, x, y)
        proportional = load * (y[0] / x[0])
        if len(x) == 1:
            return np.where(load > x[0], proportional, inside)
        below = np.maximum(y[0] - (x[0] - load) * (y[1] - y[0]) / (x[1] - x[0]), proportional)
        slope = max((y[-1] - y[-2]) / (x[-1] - x[-2]), (y[-1] - y[0]) / (x[-1] - x[0]))
        return np.where(load < x[0], below, np.where(load > x[-1], y[-1] + (load - x[-1]) * slope, inside))


@dataclass(frozen=True)
class CostModel:
    """Predicts one stage; see the module for the rules.

    Attributes:
        time, memory: curves by measured device count, ascending.
        busy: median share of the devices kept busy, by measured device count, ascending.
        durations: quantiles at 0, 1/128, ..., 1 of the items' durations over their mean, or None.
    """

    time: dict[int, Curve]
    memory: dict[int, Curve]
    busy: dict[int, float]
    durations: Floats | None = None

    @classmethod
    def fit(cls, samples: Iterable[Sample]) -> CostModel:
        """Raises ProfileError without samples, or if they belong to several stages."""
        samples = list(samples)
        if len({sample.stage for sample in samples}) != 1:
            raise ProfileError(f"expected samples of one stage, got {sorted({s.stage for s in samples})}")
        time: dict[int, Curve] = {}
        memory: dict[int, Curve] = {}
        busy: dict[int, float] = {}
        for count in sorted({sample.devices for sample in samples}):
            here = [sample for sample in samples if sample.devices == count]
            busy[count] = statistics.median(sample.busy for sample in here)
            at_load: dict[int, list[Sample]] = {}
            for sample in here:
                at_load.setdefault(-(-sample.items // needed(count, busy[count])), []).append(sample)
            loads = sorted(at_load)
            medians = np.array([statistics.median(s.seconds for s in at_load[x]) for x in loads])
            weights = np.array([len(at_load[x]) for x in loads], dtype=np.float64)
            largest = np.array([max(s.memory_bytes for s in at_load[x]) for x in loads], dtype=np.float64)
            time[count] = Curve(np.array(loads, dtype=np.float64), isotonic(medians, weights))
            memory[count] = Curve(np.array(loads, dtype=np.float64), np.maximum.accumulate(largest))
        relative = [d * len(s.durations) / total for s in samples if (total := sum(s.durations)) for d in s.durations]
        if not relative:
            return cls(time, memory, busy)
        quantiles = np.quantile(relative, np.linspace(0, 1, QUANTILES))
        return cls(time, memory, busy, quantiles / np.trapezoid(quantiles, dx=1 / (QUANTILES - 1)))

    def seconds(self, items: ArrayLike, devices: ArrayLike) -> Floats:
        """Seconds of one call with `items` on `devices`; both broadcast. Non-decreasing in items."""
        return _across_counts(self.time, self.busy, items, devices)

    def busy_share(self, devices: ArrayLike) -> Floats:
        """Share of `devices` that a call keeps busy: that of the nearest smaller measured count."""
        count = np.asarray(devices, dtype=np.float64)
        measured = np.array(list(self.busy))
        nearest = np.maximum(np.searchsorted(measured, count, side="right") - 1, 0)
        share = np.array(list(self.busy.values()))[nearest]
        return np.minimum(share * np.maximum(measured[nearest] / count, 1.0), 1.0)

    def memory_bytes(self, items: ArrayLike, devices: ArrayLike) -> Floats:
        """Peak bytes on one device of such a call; both arguments broadcast."""
        count = min(self.memory)
        shards = np.maximum(count / np.asarray(devices, dtype=np.float64), 1.0)
        return _across_counts(self.memory, self.busy, items, devices) * shards

    def sample_factor(self, items: int, rng: np.random.Generator) -> float:
        """Random factor of mean 1 on the seconds of a call: the mean of `items` drawn durations over their mean."""
        if self.durations is None:
            return 1.0
        return float(np.interp(rng.random(items), np.linspace(0, 1, QUANTILES), self.durations).mean())


def isotonic(values: Floats, weights: Floats) -> Floats:
    """Least-squares non-decreasing fit, shape [n]: pool adjacent violators (Barlow et al. 1972)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, wa, na), (b, wb, nb) = blocks[-2:]
            blocks[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return np.repeat([mean for mean, _, _ in blocks], [length for _, _, length in blocks])


def needed(devices: int, busy: float) -> int:
    """How many of `devices` a stage needs that keeps this share of them busy."""
    return max(1, round(devices * busy))


def _across_counts(curves: dict[int, Curve], busy: dict[int, float], items: ArrayLike, devices: ArrayLike) -> Floats:
    wanted, count = np.broadcast_arrays(np.asarray(items, dtype=np.float64), np.asarray(devices, dtype=np.float64))
    measured = list(curves)

    def on(curve: int, n: Floats) -> Floats:
        useful = needed(curve, busy[curve])
        working = np.where(n < curve, np.minimum(n, useful), n * useful / curve)
        return curves[curve].at(np.ceil(wanted / working - 1e-9))

    value = on(measured[0], count)
    for low, high in zip(measured, measured[1:], strict=False):
        share = np.clip(np.log(count / low) / np.log(high / low), 0.0, 1.0)
        a, b = on(low, np.full_like(count, low)), on(high, np.full_like(count, high))
        between = np.where(np.minimum(a, b) > 0, np.exp(_log(a) * (1 - share) + _log(b) * share), a + (b - a) * share)
        between = np.where(count == high, b, np.where(count == low, a, between))
        value = np.where(count >= low, np.where(count > high, on(high, count), between), value)
    return value


def _log(value: Floats) -> Floats:
    return np.log(np.maximum(value, 1e-300))


@dataclass(frozen=True)
class Switch:
    """Seconds to move a group's device memory to the host (`offload_s`) and back (`onload_s`)."""

    offload_s: float
    onload_s: float


@dataclass
class Profile:
    """What is known of one recipe on one machine.

    Attributes:
        samples: by stage ("group.method"), oldest first.
        switches: by group; a group without one cannot be offloaded.
        resident_bytes: by group: bytes on each of its devices while it is idle but not offloaded.
        hops: by loop: seconds that the messages of one round spend between its two stages.
        overhead_s: seconds of an iteration before the first stage begins and after the last ends.
    """

    machine: str = "here"
    recipe: str = "default"
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    switches: dict[str, Switch] = field(default_factory=dict)
    resident_bytes: dict[str, int] = field(default_factory=dict)
    hops: dict[str, float] = field(default_factory=dict)
    overhead_s: float = 0.0
    _models: dict[str, CostModel] = field(default_factory=dict, repr=False, compare=False)

    def add(self, *samples: Sample) -> Profile:
        """Take measurements in; of each point (stage, items, devices) the last 5 count. Returns the profile."""
        for sample in samples:
            known = self.samples.setdefault(sample.stage, [])
            known.append(sample)
            point = [s for s in known if (s.items, s.devices) == (sample.items, sample.devices)]
            if len(point) > KEEP:
                del known[next(i for i, s in enumerate(known) if s is point[0])]
            self._models.pop(sample.stage, None)
        return self

    def add_group(
        self,
        group: str,
        resident_bytes: int | None = None,
        offload_s: float | None = None,
        onload_s: float | None = None,
    ) -> Profile:
        """Set what was measured of a worker group. Returns the profile."""
        if resident_bytes is not None:
            self.resident_bytes[group] = resident_bytes
        if offload_s is not None and onload_s is not None:
            self.switches[group] = Switch(offload_s, onload_s)
        return self

    def model(self, stage: str) -> CostModel:
        """Raises ProfileError if the stage was not measured."""
        if stage not in self._models:
            if not self.samples.get(stage):
                known = ", ".join(self.samples) or "none"
                raise ProfileError(f"no measurement of '{stage}'; measured for {self.key}: {known}")
            self._models[stage] = CostModel.fit(self.samples[stage])
        return self._models[stage]

    @property
    def key(self) -> str:
        return f"{self.recipe} on {self.machine}"

    def save(self, path: Path | str) -> None:
        """Write to a YAML file, beside the profiles of other recipes and machines that it holds."""
        path = Path(path)
        entries = _read(path) if path.exists() else []
        entries = [e for e in entries if (e["machine"], e["recipe"]) != (self.machine, self.recipe)]
        entry = {
            "machine": self.machine,
            "recipe": self.recipe,
            "resident_bytes": dict(self.resident_bytes),
            "switches": {group: asdict(switch) for group, switch in self.switches.items()},
            "hops": dict(self.hops),
            "overhead_s": self.overhead_s,
            "samples": [_plain(sample) for samples in self.samples.values() for sample in samples],
        }
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(yaml.safe_dump({"profiles": [*entries, entry]}, sort_keys=False))
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path | str, machine: str = "here", recipe: str = "default") -> Profile:
        """Raises ProfileError if the file is none of profiles or has none for this machine and recipe."""
        entries = _read(Path(path))
        for entry in entries:
            if (entry["machine"], entry["recipe"]) == (machine, recipe):
                switches = {group: Switch(**switch) for group, switch in entry["switches"].items()}
                hops, overhead = dict(entry.get("hops", {})), entry.get("overhead_s", 0.0)
                profile = cls(machine, recipe, {}, switches, dict(entry["resident_bytes"]), hops, overhead)
                try:
                    samples = [Sample(**{**s, "durations": tuple(s.get("durations", ()))}) for s in entry["samples"]]
                except TypeError as error:
                    raise ProfileError(f"{path}: a measurement of {recipe} cannot be read: {error}") from None
                return profile.add(*samples)
        elsewhere = [entry["machine"] for entry in entries if entry["recipe"] == recipe]
        known = f"one of it on {', '.join(elsewhere)}" if elsewhere else f"{len(entries)} of others"
        raise ProfileError(f"{path} has no profile of {recipe} on {machine}; it has {known}")


def profiles_in(path: Path | str) -> list[tuple[str, str]]:
    """(machine, recipe) of each profile in a file. Raises ProfileError if it holds none."""
    path = Path(path)
    if not path.exists():
        raise ProfileError(f"there is no file {path}")
    return [(entry["machine"], entry["recipe"]) for entry in _read(path)]


def _plain(sample: Sample) -> dict[str, object]:
    durations = {"durations": [float(d) for d in sample.durations]} if sample.durations else {}
    return {
        "stage": sample.stage,
        "items": int(sample.items),
        "devices": int(sample.devices),
        "seconds": float(sample.seconds),
        "memory_bytes": int(sample.memory_bytes),
        "busy": float(sample.busy),
        **durations,
    }


def _read(path: Path) -> list[dict]:
    try:
        content = yaml.safe_load(path.read_text())
        entries = list(content["profiles"])
        if all({"machine", "recipe", "samples", "switches", "resident_bytes"} <= set(entry) for entry in entries):
            return entries
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, KeyError):
        pass
    raise ProfileError(f"{path} is not a file of profiles (a YAML mapping with the key 'profiles')")
