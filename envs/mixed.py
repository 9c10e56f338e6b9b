"""Vector envs of several kinds as one, for a policy that learns all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from envs.base import ChunkResult, EnvError, EnvSpec, Observation, VectorEnv
from envs.joined import JoinedVectorEnv

PROCESSES = 1000  # numbers of one part's env processes in `ChunkResult.spans`; the next part's follow


def mix(envs: Sequence[VectorEnv]) -> VectorEnv:
    """One vector env of all rows of `envs`, in their order. Raises EnvError for kinds that do not go together."""
    return envs[0] if len(envs) == 1 else MixedVectorEnv(envs)


class MixedVectorEnv(JoinedVectorEnv):
    """Row under row. States are filled up with zeros to the longest; of the cameras, those that all have are shown."""

    def __init__(self, envs: Sequence[VectorEnv]) -> None:
        super().__init__(envs)
        self.spec = common_spec([env.spec for env in envs])

    def chunk_step_wait(self) -> ChunkResult:
        result = super().chunk_step_wait()
        part, last, spans = 0, -1, []
        for number, *times in result.spans:  # each part's begin anew
            part, last = part + (number <= last), number
            spans.append((part * PROCESSES + number, *times))
        result.spans = cast(list[tuple[int, float, float, float]], spans)
        return result

    def _stack(self, parts: Sequence[Observation]) -> Observation:
        return super()._stack([self._fit(part) for part in parts])

    def _fit(self, observation: Observation) -> Observation:
        fitted: dict[str, Any] = {**observation}
        if self.spec.state_size is not None:
            missing = self.spec.state_size - observation["state"].shape[1]
            fitted["state"] = np.pad(observation["state"], ((0, 0), (0, missing)))
        if self.spec.image_shape is not None:
            fitted["image"] = observation["image"][:, : self.spec.image_shape[0]]
        return cast(Observation, fitted)


def common_spec(specs: Sequence[EnvSpec]) -> EnvSpec:
    """What a policy for all of them sees and does. Raises EnvError where they differ in more than can be adapted."""
    first = specs[0]
    for spec in specs[1:]:
        if spec.action != first.action:
            raise EnvError(
                f"{spec.instruction!r} and {first.instruction!r} have other actions: {spec.action} and {first.action}; "
                "a mix needs the same, for which there are control_mode and fixed_actions"
            )
        if (spec.state_size is None) != (first.state_size is None):
            raise EnvError(f"of the envs of a mix all have a state or none: {spec.state_size}, {first.state_size}")
        if (spec.image_shape or (0,))[1:] != (first.image_shape or (0,))[1:]:
            raise EnvError(f"the envs of a mix draw pictures of other sizes: {spec.image_shape}, {first.image_shape}")
    views = None if first.image_shape is None else min(spec.image_shape[0] for spec in specs if spec.image_shape)
    return dataclasses.replace(
        first,
        state_size=None if first.state_size is None else max(spec.state_size or 0 for spec in specs),
        image_shape=None if views is None or first.image_shape is None else (views, *first.image_shape[1:]),
        horizon=max(spec.horizon for spec in specs),
        has_success=all(spec.has_success for spec in specs),
        tasks=tuple(task for spec in specs for task in spec.tasks),
    )
