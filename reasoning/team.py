"""The worker groups of a reasoning run, and the flows that they work in (see `reasoning.flows`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from embodied_rl.flows import weights_flow
from embodied_rl.team import Team
from reasoning.actor import LanguageActor
from reasoning.config import MathConfig
from reasoning.data import Problem
from reasoning.evaluate import Judged
from reasoning.flows import evaluation_flow, training_flow
from reasoning.samples import EVALUATION, Group, Prompt, Sampling
from reasoning.workers import Judge, Sampler
from scheduler.cluster import Cluster
from scheduler.execute import Schedule
from scheduler.executor import Executor, Iteration
from scheduler.placement import parse_placement
from scheduler.profile import Profile
from scheduler.worker import Worker, WorkerGroup

EVERYWHERE = "sampler, judge, actor: all"


class MathTeam(Team):
    """Started worker groups. Every call raises WorkerFailed or WorkerDied with the first cause.

    Args:
        groups: which to start; an evaluation needs no actor.
        profile: what earlier runs have measured; this one adds to it.
    """

    classes: ClassVar[dict[str, type[Worker]]] = {"sampler": Sampler, "judge": Judge, "actor": LanguageActor}
    config: MathConfig  # type: ignore[assignment]

    def __init__(
        self,
        config: MathConfig,
        cluster: Cluster,
        groups: Sequence[str] = tuple(classes),
        profile: Profile | None = None,
    ) -> None:
        self.config, self.timeout_s = config, config.cluster.timeout_s
        text = EVERYWHERE if config.placement == "auto" else config.placement
        placement = parse_placement(text, len(cluster.devices), list(self.classes), cluster.kind)
        launched = {name: cluster.launch(name, self.classes[name], placement[name], config) for name in groups}
        cluster.await_start(list(launched.values()))
        self.groups: dict[str, WorkerGroup] = {name: group for name, (group, _) in launched.items()}
        self.sampler, self.judge = self.groups["sampler"], self.groups["judge"]
        if "actor" in self.groups:
            self.actor = self.groups["actor"]
            self._weights = Executor(weights_flow(self.sampler, self.actor), 1)
            flow = training_flow(config, self.sampler, self.judge, self.actor)
            self._training = Executor(flow, config.sampling.prompts)
            self.schedule = Schedule(self._training, profile or Profile())

    # ------------------------------------------------------------------------------------------ the flows

    def sync_weights(self, iteration: int = 0) -> None:
        """Bring the actor's parameters, which have learned for `iteration` iterations, to the samplers."""
        self._weights.number = iteration - 1
        self._weights.iterate({"request": [None]})

    def iterate(  # type: ignore[override]
        self,
        iteration: int,
        prompts: list[Prompt],
        left: int,
        groups: list[Group] | None = None,
        is_last: bool = True,
    ) -> tuple[Iteration, dict[str, float]]:
        """One iteration of training, of which `left` will be run; and what the schedule says of it.

        Args:
            prompts: to be sampled now.
            groups: to learn from, where they were sampled in the iteration before (`sampling.ahead`).
            is_last: learn from what there is; else `actor.update` may ask for more, and nothing is learned yet.
        """
        sources: dict[str, Sequence[Any]] = {"prompts": prompts} | ({} if groups is None else {"groups": groups})
        arguments = {"sampler.generate": (self._sampling,), "actor.update": (is_last,)}
        self._training.number = iteration
        if self.config.placement == "auto":
            return self.schedule.iterate(sources, arguments, left)
        return self._training.iterate(sources, arguments), {}

    def sample(self, prompts: Sequence[Prompt], settings: Sampling | None = None) -> list[Group]:
        """Groups of the samplers' model on prompts, judged; nothing is learned."""
        executor = Executor(evaluation_flow(len(prompts), self.sampler, self.judge), len(prompts))
        done = executor.iterate({"prompts": prompts}, {"sampler.generate": (settings or self._sampling,)})
        return done.outputs["judge.score"]

    @property
    def _sampling(self) -> Sampling:
        sampling = self.config.sampling
        return Sampling(sampling.group_size, sampling.temperature, sampling.max_new_tokens)

    def evaluate(  # type: ignore[override]
        self, problems: Sequence[Problem], samples: int, temperature: float
    ) -> list[Judged]:
        """Completions of the samplers' model on problems, judged; temperature 0 takes the likeliest tokens."""
        prompts = [Prompt(problem, EVALUATION + number) for number, problem in enumerate(problems)]
        settings = Sampling(samples, temperature, self.config.sampling.max_new_tokens)
        return [Judged.of(group) for group in self.sample(prompts, settings)]

    def warm_start(self, batches: list[list[Problem]]) -> float:
        """Supervised steps on reference answers; returns the last loss."""
        return self.actor.warm_start(batches).result(self.timeout_s)[0]

    # ------------------------------------------------------------------------------------------ state and trace

    def save(  # type: ignore[override]
        self, run_dir: Path, step: int, state: dict[str, Any], groups: list[Group]
    ) -> Path:
        """Write a checkpoint, with groups that are still to be learned from, and return its path."""
        return self.actor.save(run_dir, step, state, [asdict(group) for group in groups]).result(self.timeout_s)[0]

    def load(self, checkpoint: Path) -> tuple[dict[str, Any], list[Group]]:  # type: ignore[override]
        """Go on from a checkpoint; returns the driver's state and the groups stored in it."""
        state, groups = self.actor.load(checkpoint).result(self.timeout_s)[0]
        return state, [Group.of(group) for group in groups]

    def process_ids(self) -> dict[str, int]:
        """The process of every worker, by name."""
        return {group.worker_name(r): at.pid for group in self.groups.values() for r, at in enumerate(group.locations)}

    def verdicts(self) -> dict[str, int]:
        """Verdicts so far, over all judges."""
        ranks = self.judge.verdicts().result(self.timeout_s)
        return {key: sum(rank[key] for rank in ranks) for key in ranks[0]}
