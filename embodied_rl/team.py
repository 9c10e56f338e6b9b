"""The worker groups of an embodied run, and the flows that they work in (see `embodied_rl.flows`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from embodied_rl.build import require_fit
from embodied_rl.config import Config
from embodied_rl.data import RolloutReport
from embodied_rl.flows import evaluation_flow, training_flow, weights_flow
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.env import EnvWorker
from embodied_rl.workers.rollout import RolloutWorker
from envs.base import EnvSpec, Episode
from scheduler.cluster import Cluster
from scheduler.execute import Schedule
from scheduler.executor import Executor
from scheduler.placement import parse_placement
from scheduler.plan import Plan
from scheduler.profile import Profile
from scheduler.trace import Event
from scheduler.worker import Handle, Worker, WorkerGroup, wait_all

GROUPS = ("actor", "rollout", "env")


@dataclass
class TeamIteration:
    """The rollouts of an iteration and the update from them; `schedule` is that of the last one."""

    rollout: RolloutReport
    policy_calls: int
    learned: dict[str, float]
    schedule: dict[str, float]


class Team:
    """Started worker groups. Every call raises WorkerFailed or WorkerDied with the first cause.

    Args:
        groups: which to start; an evaluation needs no actor.
        profile: what earlier runs have measured; this one adds to it.
    """

    classes: ClassVar[dict[str, type[Worker]]] = {"actor": ActorWorker, "rollout": RolloutWorker, "env": EnvWorker}

    def __init__(
        self, config: Config, cluster: Cluster, groups: Sequence[str] = GROUPS, profile: Profile | None = None
    ) -> None:
        self.config, self.timeout_s = config, config.cluster.timeout_s
        placement = parse_placement(config.initial_placement, len(cluster.devices), GROUPS, cluster.kind)
        launched = {name: cluster.launch(name, self.classes[name], placement[name], config) for name in groups}
        cluster.await_start(list(launched.values()))
        self.groups: dict[str, WorkerGroup] = {name: group for name, (group, _) in launched.items()}
        self.env, self.rollout = self.groups["env"], self.groups["rollout"]
        self.spec: EnvSpec = self.env.spec().result(self.timeout_s)[0]
        require_fit(config, self.spec)
        self.server_versions: dict[str, dict[str, str]] = {}
        for versions in self.env.server_versions().result(self.timeout_s):
            self.server_versions |= versions
        self._wait([self.groups[name].build(self.spec) for name in groups if name != "env"])
        envs = config.env.num_envs
        self._evaluation = Executor(evaluation_flow(config, self.env, self.rollout), envs)
        if "actor" in self.groups:
            self.actor = self.groups["actor"]
            self._weights = Executor(weights_flow(self.rollout, self.actor), 1)
            training = Executor(training_flow(config, self.env, self.rollout, self.actor), envs)
            fixed = config.placement != "auto"
            self.schedule = Schedule(training, profile or Profile(), fixed, accepts=self._can_run)

    @property
    def score(self) -> str:
        """What tells good policies from bad: the success that counts, or `return` where the env knows none."""
        return self.config.env.score if self.spec.has_success else "return"

    def _can_run(self, plan: Plan) -> bool:
        """Whether the envs divide among the env workers of a plan, and their groups among its pipeline groups, of which
        every actor worker has one to learn from."""
        places = parse_placement(plan.placement_text, plan.num_devices, GROUPS, self.env.cluster.kind)
        workers, choices = len(places["env"].ranks), self.config.pipeline_choices
        divides = self.config.env.num_envs % (workers * max(choices)) == 0
        return divides and len(places["actor"].ranks) <= workers * min(choices)

    def _wait(self, handles: list[Handle]) -> list[list[Any]]:
        wait_all(handles, self.timeout_s)
        return [handle.result() for handle in handles]

    def process_ids(self) -> dict[str, int]:
        """The process of every worker and of its env processes, by name."""
        ids = {group.worker_name(r): at.pid for group in self.groups.values() for r, at in enumerate(group.locations)}
        for rank, pids in enumerate(self.env.process_ids().result(self.timeout_s)):
            ids |= {f"{self.env.worker_name(rank)}.p{number}": pid for number, pid in enumerate(pids)}
        return ids

    # ------------------------------------------------------------------------------------------ the flows

    def sync_weights(self) -> None:
        """Bring the actor's parameters to the rollout workers, where no update has."""
        self._weights.iterate({"request": [None]})

    def iterate(self, iteration: int, left: int) -> TeamIteration:
        """One iteration of the training flow, of which `left` will be run, under the best plan known.

        The flow is run until the actor has what it learns from: see `rollout.epochs`.
        """
        rollouts, calls = None, 0
        learned: dict[str, float] = {}
        schedule: dict[str, float] = {}
        while not learned:
            self.schedule.executor.number = iteration
            done, schedule = self.schedule.iterate(left=left * self.config.rollout.epochs)
            report = RolloutReport.merge(done.reports["env.rollout"])
            rollouts = rollouts.then(report) if rollouts else report
            calls += sum(done.reports["rollout.generate"])
            learned = done.reports["actor.update"][0]
        assert rollouts is not None
        return TeamIteration(rollouts, calls, learned, schedule)

    def evaluate(self, episodes: int, base_seed: int, deterministic: bool) -> list[Episode]:
        """Run evaluation episodes, each seed once; sorted by seed, with their actions."""
        arguments = {"env.evaluate": (episodes, base_seed), "rollout.serve": (deterministic,)}
        found = self._evaluation.iterate(arguments=arguments).reports["env.evaluate"]
        return sorted((episode for rank in found for episode in rank), key=lambda episode: episode.seed)

    def render(self, episodes: list[Episode]) -> list[np.ndarray]:
        """Films of recorded episodes, uint8 [T + 1, H, W, 3]."""
        calls: list[tuple[tuple, dict]] = [((episodes,), {})] + [(([],), {})] * (len(self.env) - 1)
        return self.env.render.sharded(calls).result(self.timeout_s)[0]

    # ------------------------------------------------------------------------------------------ state and trace

    def save(self, run_dir: Path, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint and return its path."""
        envs = self.env.state().result(self.timeout_s)
        return self.actor.save(run_dir, step, state, envs).result(self.timeout_s)[0]

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Go on from a checkpoint; returns the driver's state stored in it."""
        state, envs = self.actor.load(checkpoint).result(self.timeout_s)[0]
        self.env.restore(envs).wait(self.timeout_s)
        return state

    def load_policy(self, checkpoint: Path) -> None:
        """Let actor and rollout workers take the parameters of a checkpoint."""
        self.actor.load_policy(checkpoint).wait(self.timeout_s)
        self.sync_weights()

    def export(self, directory: Path) -> None:
        """Write the actor's policy as a checkpoint in the format of the one that it was made from."""
        self.actor.export(directory).wait(self.timeout_s)

    def drain_trace(self) -> list[Event]:
        """The workers' timelines since the last call."""
        ranks = self._wait([group.drain_trace() for group in self.groups.values()])
        return [event for group in ranks for rank in group for event in rank]

    def close(self) -> None:
        """Let workers end their child processes."""
        self._wait([group.shutdown() for group in self.groups.values()])
