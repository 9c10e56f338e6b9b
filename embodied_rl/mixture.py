"""Which envs a run has: one kind, or several sampled by weight; here, or on servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from embodied_rl.config import Config, EnvConfig


@dataclass(frozen=True)
class EnvPart:
    """A share of a run's envs: all of one kind, and on one server at the most."""

    env: EnvConfig
    weight: float


def env_parts(env: EnvConfig) -> list[EnvPart]:
    """What `env.mix` and the addresses in `env.server` cut the envs into."""
    kinds = [EnvPart(env, 1.0)] if not env.mix else []
    for share in env.mix:
        given = share.model_dump(exclude={"weight"}, exclude_none=True)
        kinds.append(EnvPart(env.model_copy(update={**given, "mix": ()}), share.weight))
    parts = []
    for kind in kinds:
        servers: list[tuple[str, ...]] = [(address,) for address in kind.env.server] or [()]
        for server in servers:
            parts.append(EnvPart(kind.env.model_copy(update={"server": server}), kind.weight / len(servers)))
    return parts


def allot(count: int, weights: Sequence[float], unit: int = 1, minimum: int = 0) -> list[int]:
    """`count` cut in proportion to weights, by largest remainders, into multiples of `unit` of at least `minimum`."""
    units = count // unit
    exact = [units * weight / sum(weights) for weight in weights]
    given = [max(minimum, math.floor(share)) for share in exact]
    while sum(given) != units:
        step = 1 if sum(given) < units else -1
        able = [i for i in range(len(given)) if step > 0 or given[i] > minimum]
        chosen = max(able, key=lambda i: step * (exact[i] - given[i]))
        given[chosen] += step
    return [share * unit for share in given]


def rows_of_parts(config: Config, rows: int) -> list[int]:
    """How many of the rows of a pipeline group each part has; groups of GRPO are not cut."""
    unit = config.algorithm.group_size if config.algorithm.name == "grpo" else 1
    return allot(rows, [part.weight for part in env_parts(config.env)], unit, minimum=1)
