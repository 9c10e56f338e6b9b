"""Random numbers that belong to the env slot, not to the batch.

A counter-based generator: the numbers of a slot depend on the seed, the slot and how often that slot has drawn, and
on nothing else. Any split of the envs into batches draws the same numbers, and the state is one counter for each slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Integers = Sequence[int] | np.ndarray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LANES = 64  # arrays are padded to whole SIMD vectors, so that a number does not depend on its position


class SlotNoise:
    """The streams of some env slots.

    Args:
        seed: of the run.
        slots: number of each env in the whole run.
        draws: draws each slot has made so far.
    """

    def __init__(self, seed: int, slots: Integers, draws: Integers | None = None) -> None:
        self.keys = _mix(_mix(np.full(len(slots), seed, np.uint64)) ^ np.asarray(slots, np.uint64) * _GOLDEN)
        self.draws = np.zeros(len(slots), np.uint64) if draws is None else np.asarray(draws, np.uint64)

    def uniform(self, size: int) -> np.ndarray:
        """Float64 in (0, 1), [slots, size]; every slot has then drawn once more."""
        numbers = np.arange(size, dtype=np.uint64)[None]
        bits = _mix(_mix(self.keys + self.draws * _GOLDEN)[:, None] + numbers * _GOLDEN)
        self.draws = self.draws + np.uint64(1)
        return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    def normal(self, size: int) -> np.ndarray:
        """Standard normal float32, [slots, size], by Box and Muller's transform."""
        uniform = self.uniform(2 * size)
        radius, angle = uniform[:, :size].reshape(-1), uniform[:, size:].reshape(-1)
        padding = -len(radius) % _LANES
        radius, angle = np.pad(radius, (0, padding), constant_values=0.5), np.pad(angle, (0, padding))
        normal = np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)
        return normal[: uniform.shape[0] * size].reshape(-1, size).astype(np.float32)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
