"""The batches that cross worker boundaries, with their shapes.

T chunk steps, N envs (n of them in one stream), C actions in a chunk, A action dimensions.
A stream is one pipeline group of one env worker: what is stepped, inferred and sent as one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.base import ChunkResult, Episode, Observation


@dataclass
class Observed:
    """Env to rollout: the observation to act on, and the outcome of the chunk before (None at the start).

    `slots` [n] and `draws` [n] say which random numbers each env takes next. `active` [n] bool: the envs that go on;
    the others have ended for good in this rollout, so nothing is inferred for them.
    """

    step: int
    observation: Observation
    slots: np.ndarray
    draws: np.ndarray
    active: np.ndarray
    outcome: ChunkResult | None = None


@dataclass
class Trajectories:
    """Rollout to actor: one stream's rollout, time-major.

    Attributes:
        observation: tensors [T, n, ...]; what the policy's `encode` gave.
        token, logprob: [T, n, C, A].
        value: [T, n], or [T, n, C] where the policy values each action.
        next_value: [T, n]; V(final observation) where an episode ended, else V(next observation), of its first action.
        reward, terminated, truncated, valid: [T, n, C].
        success: [T, n] bool; an episode ended here with success, at any time or at its end, as `env.success` says.
        env_ids: [n].
    """

    observation: dict[str, Tensor]
    token: Tensor
    logprob: Tensor
    value: Tensor
    next_value: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    success: Tensor
    lost: Tensor
    env_ids: Tensor

    @staticmethod
    def concatenate(parts: list[Trajectories]) -> Trajectories:
        """Streams side by side as one [T, N]."""
        joined: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts], dim=1)
            for name in (
                "token",
                "logprob",
                "value",
                "next_value",
                "reward",
                "terminated",
                "truncated",
                "valid",
                "success",
                "lost",
            )
        }
        observation = {key: torch.cat([part.observation[key] for part in parts], dim=1) for key in parts[0].observation}
        env_ids = torch.cat([part.env_ids for part in parts])
        return Trajectories(observation=observation, env_ids=env_ids, **joined)


@dataclass
class DemonstrationRows:
    """Driver to actor: which steps of a dataset of demonstrations one rank takes in one iteration of fine-tuning.

    Attributes:
        train: int64 [optimiser steps, its share of a batch].
        held_out: int64 [n]; to measure on.
    """

    train: np.ndarray
    held_out: np.ndarray


@dataclass
class RolloutReport:
    """Env worker to driver: what happened in one rollout. Replaced processes and lost episodes are those so far."""

    episodes: list[Episode] = field(default_factory=list)
    env_steps: int = 0
    seconds: float = 0.0
    busy_fraction: float = 0.0
    replaced_processes: int = 0
    lost_episodes: int = 0

    @staticmethod
    def merge(reports: list[RolloutReport]) -> RolloutReport:
        """One report for all env workers."""
        return RolloutReport(
            episodes=[episode for report in reports for episode in report.episodes],
            env_steps=sum(report.env_steps for report in reports),
            seconds=max(report.seconds for report in reports),
            busy_fraction=sum(report.busy_fraction for report in reports) / len(reports),
            replaced_processes=sum(report.replaced_processes for report in reports),
            lost_episodes=sum(report.lost_episodes for report in reports),
        )

    def then(self, later: RolloutReport) -> RolloutReport:
        """One report for a rollout and the next one."""
        seconds = self.seconds + later.seconds
        busy = self.busy_fraction * self.seconds + later.busy_fraction * later.seconds
        return RolloutReport(
            episodes=[*self.episodes, *later.episodes],
            env_steps=self.env_steps + later.env_steps,
            seconds=seconds,
            busy_fraction=busy / seconds if seconds else 0.0,
            replaced_processes=later.replaced_processes,
            lost_episodes=later.lost_episodes,
        )
