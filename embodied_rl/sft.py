"""Supervised fine-tuning on demonstrations: the training run of `train.py` with another way to learn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from embodied_rl.config import Config
from embodied_rl.data import DemonstrationRows
from embodied_rl.demonstrations import Demonstrations
from embodied_rl.flows import fine_tuning_flow
from embodied_rl.team import Team
from embodied_rl.train import Training
from embodied_rl.workers.imitator import Imitator
from scheduler.executor import Executor
from scheduler.trace import Event

HELD_OUT_ROWS = 512  # at most so many steps are measured on, in each iteration


class FineTuningTeam(Team):
    """A team whose actor imitates."""

    classes: ClassVar = {**Team.classes, "actor": Imitator}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fine_tuning = Executor(fine_tuning_flow(self.rollout, self.actor), len(self.actor))

    def imitate(self, iteration: int, rows: DemonstrationRows) -> dict[str, float]:
        """One iteration of fine-tuning, each batch shared among the actor's ranks; returns its metrics."""
        ranks = len(self.actor)
        shares = [DemonstrationRows(rows.train[:, rank::ranks], rows.held_out[rank::ranks]) for rank in range(ranks)]
        self._fine_tuning.number = iteration
        return self._fine_tuning.iterate({"demonstrations": shares}).reports["actor.imitate"][0]


class FineTuning(Training):
    """The state of a running fine-tuning."""

    team_class: ClassVar = FineTuningTeam
    team: FineTuningTeam

    def __init__(self, config: Config, *args: Any) -> None:
        super().__init__(config, *args)
        lengths = [episode.length for episode in Demonstrations(Path(str(config.sft.data))).episodes]
        self.train_rows, self.held_out = split(lengths, config.sft.held_out, config.seed)

    def _amount(self) -> str:
        sft = self.config.sft
        decisions = self.iteration * sft.steps * sft.batch
        return f"on {decisions:,} decisions ({decisions / len(self.train_rows):.1f} passes over the demonstrations)"

    def _learn(self) -> dict[str, float]:
        """One iteration: optimiser steps on demonstrations, and measurements on those that were held out."""
        start = time.monotonic()
        sft = self.config.sft
        train = batches(self.train_rows, self.iteration, sft.steps, sft.batch, self.config.seed)
        learned = self.team.imitate(self.iteration, DemonstrationRows(train, self.held_out))
        end = time.monotonic()
        self.iteration += 1
        self.events.append(Event("driver", f"iteration {self.iteration}", "mark", start, end))
        self.events += self.team.drain_trace()
        return {
            **learned,
            "time/iteration_s": end - start,
            "time/wall_s": self.earlier_s + end - self.started,
            "perf/decisions_per_s": train.size / (end - start),
        }


def split(lengths: list[int], held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps of whole episodes to train on, and up to HELD_OUT_ROWS steps of the others.

    Args:
        lengths: steps of each episode.
        held_out: share of the episodes; at least one is held out, and one is not.
    """
    generator = np.random.default_rng(seed)
    count = min(max(1, round(held_out * len(lengths))), len(lengths) - 1)
    is_held_out = np.zeros(len(lengths), bool)
    is_held_out[generator.permutation(len(lengths))[:count]] = True
    of_step = np.repeat(is_held_out, lengths)
    return np.flatnonzero(~of_step), generator.permutation(np.flatnonzero(of_step))[:HELD_OUT_ROWS]


def batches(rows: np.ndarray, iteration: int, steps: int, batch: int, seed: int) -> np.ndarray:
    """The rows [steps, batch] of an iteration. Passes over all rows follow each other, each in an order of its own."""
    passes, places = np.divmod(np.arange(steps * batch) + iteration * steps * batch, len(rows))
    orders = {number: np.random.default_rng([seed, number]).permutation(rows) for number in np.unique(passes).tolist()}
    return np.array(
        [orders[number][place] for number, place in zip(passes.tolist(), places.tolist(), strict=True)]
    ).reshape(steps, batch)
