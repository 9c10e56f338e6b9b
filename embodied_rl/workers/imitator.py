"""Imitator: the actor of supervised fine-tuning. It learns to do what demonstrations show.

The loss is the mean negative log-probability of the demonstrated action tokens among all action tokens, which are what
policies sample from. What a chunk would hold beyond the end of its episode was not demonstrated and enters no mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.data import DemonstrationRows
from embodied_rl.demonstrations import Demonstrations
from embodied_rl.sums import Sums
from embodied_rl.workers.actor import ActorWorker
from envs.base import EnvSpec
from policies.openvla import ActionTokenPolicy
from scheduler.stage import Output

KEPT_BYTES = 2 * 10**9  # prepared demonstrations that stay in memory


class Imitator(ActorWorker):
    """Holds the policy that is fine-tuned. The action statistics of the dataset become the policy's."""

    policy: ActionTokenPolicy

    def build(self, spec: EnvSpec) -> None:
        super().build(spec)
        self.demonstrations = Demonstrations(Path(str(self.config.sft.data)))
        name = self.demonstrations.settings["env"]["id"]
        self.policy.adopt_statistics({name: self.demonstrations.statistics}, name)
        self._kept: dict[int, tuple[dict[str, Tensor], Tensor, Tensor]] = {}

    def imitate(self, shares: list[DemonstrationRows]) -> Output:
        """Take one optimiser step for each batch, then measure on what is held out.

        Gives the new parameters (rank 0 does); reports the metrics, the same on every rank.
        """
        (share,) = shares
        self._set_learning_rate(self.iteration)
        sums = Sums()
        sums.add("losses/learning_rate", self.optimizer.param_groups[0]["lr"])
        for rows in share.train:
            self._imitate(rows, sums)
        metrics = sums.means(self._total) | self._measure(share.held_out)
        return Output(self.weights([]) if self.rank == 0 else [], metrics)

    def _imitate(self, rows: np.ndarray, sums: Sums) -> None:
        """One optimiser step."""
        sums.begin_minibatch()
        self.optimizer.zero_grad()
        actions = self.demonstrations.actions_left(rows).clip(max=self.policy.chunk).sum()
        count = self._total(torch.tensor(float(actions), device=self.device))
        size = self.config.algorithm.micro_batch or len(rows)
        for first in range(0, len(rows), size):
            observation, action, valid = self._demonstrated(rows[first : first + size])
            logprob, _, _ = self.policy.evaluate(observation, self.policy.tokenise(action))
            loss = -torch.where(valid, logprob.mean(-1), 0.0).sum() / count
            loss.backward()
            sums.add_part("losses/imitation", loss)
        sums.add("losses/grad_norm", float(self._reduce_and_clip_gradients()))
        self.optimizer.step()

    @torch.no_grad()
    def _measure(self, rows: np.ndarray) -> dict[str, float]:
        """Greedy actions beside the demonstrated ones: tokens that are equal, and the distance in the env's units."""
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        size = self.config.algorithm.micro_batch or self.config.sft.batch
        for first in range(0, len(rows), size):
            observation, action, valid = self._demonstrated(rows[first : first + size])
            token = self.policy.tokenise(action)
            logprob, _, _ = self.policy.evaluate(observation, token)
            greedy = self.policy.act(observation, deterministic=True, generator=None)
            parts = (-logprob, (greedy.token == token).double(), (greedy.action - action).abs())
            sums += torch.tensor([*(part[valid].sum() for part in parts), token[valid].numel()], device=self.device)
        loss, right, distance, count = self._total(sums).tolist()
        return {
            "held_out/loss": loss / count,
            "held_out/token_accuracy": right / count,
            "held_out/action_l1": distance / count,
        }

    def _demonstrated(self, rows: np.ndarray) -> tuple[dict[str, Any], Tensor, Tensor]:
        """Prepared observations [N, ...] of steps of the dataset, the actions from there on, float32 [N, C, A], and
        which of these there are, bool [N, C]."""
        if missing := [row for row in rows.tolist() if row not in self._kept]:
            observation, actions, valid = self.demonstrations.batch(missing, self.policy.chunk)
            arrays = {key: torch.from_numpy(value) for key, value in observation.items() if key != "instruction"}
            prepared = self.policy.prepare({**observation, **arrays})
            for place, row in enumerate(missing):  # each alone: what is kept does not depend on the rest of its batch
                encoded = self.policy.encode({key: value[place : place + 1] for key, value in prepared.items()})
                sample = {key: value[0].cpu() for key, value in encoded.items()}
                if len(self._kept) * sum(value.nbytes for value in sample.values()) > KEPT_BYTES:
                    self._kept = {row: self._kept[row] for row in rows.tolist() if row in self._kept}
                self._kept[row] = sample, torch.from_numpy(actions[place]), torch.from_numpy(valid[place])
        samples = [self._kept[row] for row in rows.tolist()]
        stack = lambda tensors: torch.stack(list(tensors)).to(self.device)  # noqa: E731
        stacked = {key: stack(sample[0][key] for sample in samples) for key in samples[0][0]}
        return stacked, stack(action for _, action, _ in samples), stack(valid for *_, valid in samples)
