"""From trajectories to what an update learns from: the decisions that count, with their advantages and returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from embodied_rl import algorithms as rl
from embodied_rl.config import AlgorithmConfig
from embodied_rl.data import Trajectories


@dataclass
class Batch:
    """B decisions. What belongs to a value is [B], or [B, C] where the policy values each action.

    Attributes:
        observation: tensors [B, ...].
        token, logprob: [B, C, A]; what was sampled.
        valid: bool [B, C]; the actions that were executed.
        value, advantage, returns: [B] or [B, C].
        reference: [B, C, A]; log-probs of a reference policy, if the loss asks for one.
    """

    observation: dict[str, Tensor]
    token: Tensor
    logprob: Tensor
    valid: Tensor
    value: Tensor
    advantage: Tensor
    returns: Tensor
    reference: Tensor | None = None

    def __len__(self) -> int:
        return len(self.token)

    @property
    def counts(self) -> Tensor:
        """Which values and advantages count, bool of their shape."""
        return self.valid if self.value.ndim == 2 else self.valid.any(-1)

    def rows(self, index: Tensor, device: torch.device | None = None) -> Batch:
        """Some of the decisions, on another device if one is given."""
        own = {
            name: None if tensor is None else tensor[index].to(device)
            for name, tensor in self.__dict__.items()
            if name != "observation"
        }
        return Batch(observation={key: value[index].to(device) for key, value in self.observation.items()}, **own)  # type: ignore[arg-type]

    @staticmethod
    def concatenate(parts: list[Batch]) -> Batch:
        """Decisions of several rollouts as one batch; none has a reference yet."""
        names = ("token", "logprob", "valid", "value", "advantage", "returns")
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        keys = parts[0].observation
        return Batch(observation={key: torch.cat([part.observation[key] for part in parts]) for key in keys}, **joined)


@dataclass
class Gathered:
    """What an actor has of the iteration that it gathers rollouts for.

    Attributes:
        batches: of each rollout.
        seen: of each rollout, tensors [T, n, ...]; what the policy has to observe.
        groups: that remain.
        moments: number, sum and sum of squares of the advantages of episodes that remain.
        counts: float64 [2] by the name of a metric; its parts, and the wholes that they are of.
    """

    batches: list[Batch] = field(default_factory=list)
    seen: list[dict[str, Tensor]] = field(default_factory=list)
    groups: int = 0
    moments: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    counts: dict[str, Tensor] = field(default_factory=dict)

    def count(self, name: str, part: float, whole: float) -> None:
        """Add to a metric that is a share."""
        self.counts[name] = self.counts.get(name, 0.0) + torch.tensor([part, whole], dtype=torch.float64)

    @staticmethod
    def dealt(parts: list[Gathered], rank: int, ranks: int) -> Gathered:
        """What one of so many ranks goes on with, of what other ranks had before."""
        if len(parts) == ranks:
            return parts[rank]
        batches = [Batch.concatenate(list(same)) for same in zip(*(part.batches for part in parts), strict=True)]
        seen = [
            {key: torch.cat([one[key] for one in same], dim=1)[:, rank::ranks] for key in same[0]}
            for same in zip(*(part.seen for part in parts), strict=True)
        ]
        summed = {name: torch.stack([part.counts[name] for part in parts]).sum(0) for name in parts[0].counts}
        counts = {name: count * (rank == 0) for name, count in summed.items()}
        groups = sum(part.groups for part in parts) * (rank == 0)
        moments = torch.stack([part.moments for part in parts]).sum(0) * (rank == 0)
        own = [batch.rows(torch.arange(len(batch))[rank::ranks]) for batch in batches]
        return Gathered(own, seen, groups, moments, counts)


def decisions(rollout: Trajectories, algorithm: AlgorithmConfig, gathered: Gathered) -> None:
    """Add the decisions of a rollout to a batch, and what is to be said of them to its metrics."""
    if algorithm.name == "ppo":
        advantage, returns = rl.chunk_gae(
            rollout.reward,
            rollout.value,
            rollout.next_value,
            rollout.terminated,
            rollout.truncated,
            rollout.valid,
            algorithm.gamma,
            algorithm.lam,
        )
        kept = rollout.valid.any(-1)
    else:
        advantage, kept = _group_advantage(rollout, algorithm, gathered)
        returns = rollout.value
    gathered.batches.append(
        Batch(
            observation={key: value[kept] for key, value in rollout.observation.items()},
            token=rollout.token[kept],
            logprob=rollout.logprob[kept],
            valid=rollout.valid[kept],
            value=rollout.value[kept],
            advantage=advantage[kept],
            returns=returns[kept],
        )
    )


def _group_advantage(rollout: Trajectories, algorithm: AlgorithmConfig, gathered: Gathered) -> tuple[Tensor, Tensor]:
    """One advantage for each env's episode, repeated over its values; and the decisions that remain, bool [T, N]."""
    group_id = rollout.env_ids // algorithm.group_size
    intact = ~rollout.lost.any(0)
    success = rollout.success.any(0).float()
    episode_return = torch.where(rollout.valid, rollout.reward, 0.0).sum((0, 2))
    score = success if algorithm.group_score == "success" else episode_return
    whitened = algorithm.group_advantage == "reinforce_baseline"  # by the batch, which this is a part of
    kind = "dr_grpo" if whitened else algorithm.group_advantage
    advantage = rl.group_advantages(score, group_id, kind, valid=intact)
    groups = len(group_id[intact].unique())
    gathered.count("grpo/zero_std_fraction", rl.zero_std_fraction(score, group_id, intact) * groups, groups)
    kept = intact
    if algorithm.filters_groups:
        low, high = algorithm.filter_low or 0.0, 1.0 if algorithm.filter_high is None else algorithm.filter_high
        kept = intact & rl.groups_within(success, group_id, low, high, intact)
        gathered.count("grpo/kept_fraction", float(kept.sum()), len(kept))
    gathered.groups += len(group_id[kept].unique())
    gathered.moments += torch.stack(rl.masked_moments(advantage, kept))
    spread = advantage.view(1, -1, *[1] * (rollout.value.ndim - 2)).expand_as(rollout.value)
    return spread, rollout.valid.any(-1) & kept
