"""The worker groups of a reasoning run, and the flows that they work in (see `reasoning.flows`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied_rl.flows import weights_flow
from reasoning.actor import LanguageActor
from reasoning.config import MathConfig
from reasoning.data import Problem
from reasoning.evaluate import Judged
from reasoning.flows import evaluation_flow, training_flow
from reasoning.samples import Prompt, Sampling
from reasoning.workers import Judge, Sampler
from scheduler.cluster import Cluster
from scheduler.execute import Schedule
from scheduler.executor import Executor, Iteration
from scheduler.placement import parse_placement
from scheduler.profile import Profile
from scheduler.trace import Event
from scheduler.worker import WorkerGroup

GROUPS: dict[str, Any] = {"sampler": Sampler, "judge": Judge, "actor": LanguageActor}
EVERYWHERE = "sampler, judge, actor: all"
EVALUATION = 1 << 40  # numbers of prompts from here on are those of evaluations


class MathTeam:
    """Started worker groups. Every call raises WorkerFailed or WorkerDied with the first cause.

    Args:
        groups: which to start; an evaluation needs no actor.
    """

    def __init__(self, config: MathConfig, cluster: Cluster, groups: Sequence[str] = tuple(GROUPS)) -> None:
        self.config, self.timeout_s = config, config.cluster.timeout_s
        text = EVERYWHERE if config.placement == "auto" else config.placement
        placement = parse_placement(text, len(cluster.devices), list(GROUPS), cluster.kind)
        launched = {name: cluster.launch(name, GROUPS[name], placement[name], config) for name in groups}
        cluster.await_start(list(launched.values()))
        self.groups: dict[str, WorkerGroup] = {name: group for name, (group, _) in launched.items()}
        self.sampler, self.judge = self.groups["sampler"], self.groups["judge"]
        self.schedule: Schedule | None = None
        if "actor" in self.groups:
            self.actor = self.groups["actor"]
            self._weights = Executor(weights_flow(self.sampler, self.actor), 1)
            flow = training_flow(config, self.sampler, self.judge, self.actor)
            self._training = Executor(flow, config.sampling.prompts)
            if config.placement == "auto":
                self.schedule = Schedule(self._training, Profile())

    # ------------------------------------------------------------------------------------------ the flows

    def sync_weights(self, iteration: int) -> None:
        """Bring the actor's parameters, which have learned for `iteration` iterations, to the samplers."""
        self._weights.number = iteration - 1
        self._weights.iterate({"request": [None]})

    def iterate(self, iteration: int, prompts: list[Prompt], left: int) -> Iteration:
        """One iteration of training, of which `left` will be run."""
        sampling = self.config.sampling
        settings = Sampling(sampling.group_size, sampling.temperature, sampling.max_new_tokens)
        sources, arguments = {"prompts": prompts}, {"sampler.generate": (settings,)}
        self._training.number = iteration
        if self.schedule is not None:
            return self.schedule.iterate(sources, arguments, left)[0]
        return self._training.iterate(sources, arguments)

    def evaluate(self, problems: Sequence[Problem], samples: int, temperature: float) -> list[Judged]:
        """Completions of the samplers' model on problems, judged; temperature 0 takes the likeliest tokens."""
        prompts = [Prompt(problem, EVALUATION + number) for number, problem in enumerate(problems)]
        executor = Executor(evaluation_flow(len(prompts), self.sampler, self.judge), len(prompts))
        settings = Sampling(samples, temperature, self.config.sampling.max_new_tokens)
        done = executor.iterate({"prompts": prompts}, {"sampler.generate": (settings,)})
        return [Judged.of(group) for group in done.outputs["judge.score"]]

    def warm_start(self, batches: list[list[Problem]]) -> float:
        """Supervised steps on reference answers; returns the last loss."""
        return self.actor.warm_start(batches).result(self.timeout_s)[0]

    # ------------------------------------------------------------------------------------------ state and trace

    def save(self, run_dir: Path, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint and return its path."""
        return self.actor.save(run_dir, step, state, []).result(self.timeout_s)[0]

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Go on from a checkpoint; returns the driver's state stored in it."""
        return self.actor.load(checkpoint).result(self.timeout_s)[0][0]

    def export(self, directory: Path) -> None:
        """Write the model in the Hugging Face format."""
        self.actor.export(directory).wait(self.timeout_s)

    def verdicts(self) -> dict[str, int]:
        """Verdicts so far, over all judges."""
        ranks = self.judge.verdicts().result(self.timeout_s)
        return {key: sum(rank[key] for rank in ranks) for key in ranks[0]}

    def drain_trace(self) -> list[Event]:
        """The workers' timelines since the last call."""
        return [
            event for g in self.groups.values() for rank in g.drain_trace().result(self.timeout_s) for event in rank
        ]

    def close(self) -> None:
        """Let workers end their child processes."""
        for group in self.groups.values():
            group.shutdown().wait(self.timeout_s)
