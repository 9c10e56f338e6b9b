"""The worker groups of an embodied run and the channels between them.

env --observations--> rollout --trajectories--> actor
    <----actions-----         <-----weights----
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.config import Config
from embodied_rl.data import RolloutReport
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.env import EnvWorker
from embodied_rl.workers.rollout import RolloutWorker
from envs.base import EnvSpec, Episode
from scheduler.channel import Channel
from scheduler.cluster import Cluster
from scheduler.placement import parse_placement
from scheduler.trace import Event
from scheduler.worker import Handle, Worker, WorkerGroup, wait_all

GROUPS = ("actor", "rollout", "env")
CLASSES: dict[str, type[Worker]] = {"actor": ActorWorker, "rollout": RolloutWorker, "env": EnvWorker}


class Team:
    """Started worker groups. Every call raises WorkerFailed or WorkerDied with the first cause.

    Args:
        groups: which to start; an evaluation needs no actor.
    """

    def __init__(self, config: Config, cluster: Cluster, groups: Sequence[str] = GROUPS) -> None:
        self.config, self.timeout_s = config, config.cluster.timeout_s
        placement = parse_placement(config.placement, len(cluster.devices), GROUPS, cluster.kind)
        launched = {name: cluster.launch(name, CLASSES[name], placement[name], config) for name in groups}
        cluster.await_start(list(launched.values()))
        self.groups: dict[str, WorkerGroup] = {name: group for name, (group, _) in launched.items()}
        self.env, self.rollout = self.groups["env"], self.groups["rollout"]
        self.spec: EnvSpec = self.env.spec().result(self.timeout_s)[0]
        self._wait([self.groups[name].build(self.spec) for name in groups if name != "env"])
        self.streams = len(self.env) * config.rollout.pipeline_stages
        self.observations = self._channel(cluster, "observations", self.env, self.rollout)
        self.actions = self._channel(cluster, "actions", self.rollout, self.env)
        if "actor" in self.groups:
            self.actor = self.groups["actor"]
            self.trajectories = self._channel(cluster, "trajectories", self.rollout, self.actor)
            self.weights = self._channel(cluster, "weights", self.actor, self.rollout)

    def _channel(self, cluster: Cluster, name: str, producers: WorkerGroup, consumers: WorkerGroup) -> Channel:
        return cluster.channel(name, max(4, 2 * self.streams), producers, consumers)

    def _wait(self, handles: list[Handle]) -> list[list[Any]]:
        wait_all(handles, self.timeout_s)
        return [handle.result() for handle in handles]

    def process_ids(self) -> dict[str, int]:
        """The process of every worker and of its env processes, by name."""
        ids = {group.worker_name(r): at.pid for group in self.groups.values() for r, at in enumerate(group.locations)}
        for rank, pids in enumerate(self.env.process_ids().result(self.timeout_s)):
            ids |= {f"{self.env.worker_name(rank)}.p{number}": pid for number, pid in enumerate(pids)}
        return ids

    # ------------------------------------------------------------------------------------------ one iteration

    def sync_weights(self) -> None:
        """Bring the actor's parameters to the rollout workers."""
        receivers = len(self.rollout)
        self._wait([self.actor.publish_weights(self.weights, receivers), self.rollout.load_weights(self.weights)])

    def iterate(self, iteration: int) -> tuple[RolloutReport, int, dict[str, float]]:
        """One rollout and the update from it: (env report, policy calls, actor metrics)."""
        reports, calls, metrics = self._wait(
            [
                self.env.rollout(self.observations, self.actions, len(self.rollout)),
                self.rollout.generate(
                    self.observations, self.actions, self.trajectories, self.streams, len(self.actor)
                ),
                self.actor.update(self.trajectories, self.streams, iteration),
            ]
        )
        return RolloutReport.merge(reports), sum(calls), metrics[0]

    def evaluate(self, episodes: int, base_seed: int, deterministic: bool) -> list[Episode]:
        """Run evaluation episodes, each seed once; sorted by seed, with their actions."""
        found, _ = self._wait(
            [
                self.env.evaluate(self.observations, self.actions, len(self.rollout), episodes, base_seed),
                self.rollout.serve(self.observations, self.actions, deterministic, len(self.env)),
            ]
        )
        return sorted((episode for rank in found for episode in rank), key=lambda episode: episode.seed)

    def render(self, episodes: list[Episode]) -> list[np.ndarray]:
        """Films of recorded episodes, uint8 [T + 1, H, W, 3]."""
        calls: list[tuple[tuple, dict]] = [((episodes,), {})] + [(([],), {})] * (len(self.env) - 1)
        return self.env.render.sharded(calls).result(self.timeout_s)[0]

    # ------------------------------------------------------------------------------------------ state and trace

    def save(self, run_dir: Path, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint and return its path."""
        envs = self.env.save().result(self.timeout_s)
        return self.actor.save(run_dir, step, state, envs).result(self.timeout_s)[0]

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Go on from a checkpoint; returns the driver's state stored in it."""
        state, envs = self.actor.load(checkpoint).result(self.timeout_s)[0]
        self.env.load.sharded([((saved,), {}) for saved in envs]).wait(self.timeout_s)
        return state

    def load_policy(self, checkpoint: Path) -> None:
        """Let actor and rollout workers take the parameters of a checkpoint."""
        self.actor.load_policy(checkpoint).wait(self.timeout_s)
        self.sync_weights()

    def drain_trace(self) -> list[Event]:
        """The workers' timelines since the last call."""
        ranks = self._wait([group.drain_trace() for group in self.groups.values()])
        return [event for group in ranks for rank in group for event in rank]

    def close(self) -> None:
        """Let workers end their child processes."""
        self._wait([group.shutdown() for group in self.groups.values()])
