"""EnvWorker: hosts envs and streams env-step chunks into policy inference.

Its envs are cut into S pipeline groups; while the policy looks at one, another is stepped. S may change between
iterations: the envs are kept in the finest groups that the run allows, and joined.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from embodied_rl.config import Config
from embodied_rl.data import Observed, RolloutReport
from embodied_rl.mixture import allot, env_parts
from embodied_rl.workers.env_pools import EnvPools
from envs.base import ChunkResult, EnvSpec, Episode, Integers, Observation, VectorEnv, evaluation_seed
from envs.joined import join
from scheduler.stage import Link
from scheduler.worker import Worker


class EnvWorker(Worker):
    """Owns the share of the run's envs that falls to its rank."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = config.env.num_envs // self.world_size
        self.first_env = self.rank * self.num_envs
        self.finest = max(config.pipeline_choices)
        self.grouped = config.algorithm.name == "grpo"
        rows = self.num_envs // self.finest
        self.pools = EnvPools(config, rows, self.context.device_kind, len(self.devices))
        self.train_envs = self._make()
        self.evaluation_envs: list[VectorEnv] = []
        self.draws = np.zeros(self.num_envs, np.int64)
        self.started = False

    def _make(self, evaluates: bool = False) -> list[VectorEnv]:
        """The finest groups."""
        return [self._vector_env(self._rows(number, self.finest), evaluates) for number in range(self.finest)]

    def _vector_env(self, rows: slice, evaluates: bool) -> VectorEnv:
        return self.pools.vector_env(
            range(self.first_env + rows.start, self.first_env + rows.stop),
            chunk=self.config.policy.chunk,
            seed=self.config.seed,
            group_size=self.config.algorithm.group_size if self.grouped else 1,
            auto_reset=not (evaluates or self.grouped),
            record_actions=evaluates,
        )

    def _rows(self, group: int, groups: int) -> slice:
        size = self.num_envs // groups
        return slice(group * size, (group + 1) * size)

    def _groups(self, finest: Sequence[VectorEnv], count: int) -> list[VectorEnv]:
        each = len(finest) // count
        return [join(finest[first : first + each]) for first in range(0, len(finest), each)]

    def spec(self) -> EnvSpec:
        """What the envs offer."""
        return self.train_envs[0].spec

    def server_versions(self) -> dict[str, dict[str, str]]:
        """Versions of packages by the address of each env server."""
        return self.pools.server_versions

    def process_ids(self) -> list[int]:
        """The env processes, for monitoring."""
        return self.pools.pids

    # ------------------------------------------------------------------------------------------ rollout

    def rollout(self, link: Link) -> RolloutReport:
        """Step every group through one rollout of `link.steps` chunks.

        Per group T + 1 `Observed` go out (the last one only closes the rollout) and T chunks of actions come in.
        """
        start, own_cpu = time.monotonic(), time.process_time()
        report, busy = RolloutReport(), 0.0
        groups = self._groups(self.train_envs, link.groups)
        active = np.ones(self.num_envs, bool)
        for group, env in enumerate(groups):
            fresh = self.grouped or not self.started
            self._send(link, group, 0, env.reset() if fresh else env.observation(), active)
        self.started = True
        for step in range(link.steps + 1):
            for group, env in enumerate(groups):
                if step > 0:
                    result = self._finish_chunk(env, group)
                    busy += sum(end - begin for _, begin, end, _ in result.spans)
                    now = time.process_time()
                    self._measure(link, env, result, 0.0 if self.pools.on_gpu else now - own_cpu)
                    own_cpu = now
                    report.episodes += result.episodes
                    report.env_steps += int(result.valid.sum())
                    if self.grouped:
                        active[self._rows(group, link.groups)] &= ~result.ended
                    self._send(link, group, step, result.observation, active, result)
                if step < link.steps:
                    env.chunk_step_async(link.answer(group))
                    self.draws[self._rows(group, link.groups)] += 1
        report.seconds = time.monotonic() - start
        report.busy_fraction = busy / (max(1, self.pools.num_processes) * report.seconds)
        report.replaced_processes, report.lost_episodes = self.pools.counted
        return report

    def _finish_chunk(self, env: VectorEnv, group: int) -> ChunkResult:
        result = env.chunk_step_wait()
        for process, start, end, _ in result.spans:
            self.trace.add("chunk step", start, end, track=f"{self.context.name}.p{process}", group=group)
        return result

    @staticmethod
    def _measure(link: Link, env: VectorEnv, result: ChunkResult, own_cpu: float) -> None:
        """A chunk takes as long as its slowest process would alone, which is not what it waited for a core, and what
        this process does for it."""
        alone: dict[int, float] = defaultdict(float)
        for process, start, end, cpu in result.spans:
            alone[process] += min(end - start, cpu) if cpu else end - start
        seconds = max(alone.values(), default=0.0) + own_cpu
        link.add_call(env.num_envs, seconds, own_cpu + sum(cpu for *_, cpu in result.spans))

    def _send(
        self,
        link: Link,
        group: int,
        step: int,
        observation: Observation,
        active: np.ndarray,
        outcome: ChunkResult | None = None,
    ) -> None:
        rows = self._rows(group, link.groups)
        slots = np.arange(self.first_env + rows.start, self.first_env + rows.stop)
        link.send(group, Observed(step, observation, slots, self.draws[rows].copy(), active[rows].copy(), outcome))

    # ------------------------------------------------------------------------------------------ evaluation

    def evaluate(self, link: Link, episodes: int, base_seed: int) -> list[Episode]:
        """Run this rank's share of `episodes`, each seed once; the episodes, with their actions, by seed."""
        if not self.evaluation_envs:
            self.evaluation_envs = self._make(evaluates=True)
        finished: list[Episode] = []
        seeds, parts = self._seeds(episodes, base_seed), self.pools.part_of_row
        groups = self._groups(self.evaluation_envs, link.groups)
        live = [_LiveGroup(env, np.resize(parts, env.num_envs), seeds) for env in groups]
        for group, state in enumerate(live):
            self._send_live(link, group, state)
        while any(state.is_running for state in live):
            for group, state in enumerate(live):
                if state.is_running:
                    state.env.chunk_step_async(link.answer(group))
                    state.draws += 1
            for group, state in enumerate(live):
                if state.is_running:
                    finished += state.advance(self._finish_chunk(state.env, group))
                    self._send_live(link, group, state)
        link.finish()
        return sorted(finished, key=lambda episode: episode.seed)

    def _seeds(self, episodes: int, base_seed: int) -> list[Iterator[int]]:
        """This rank's evaluation seeds for each part of the envs."""
        counts = allot(episodes, [part.weight for part in env_parts(self.config.env)])
        seeds, first = [], 0
        for count in counts:
            own = [number for number in range(first, first + count) if number % self.world_size == self.rank]
            seeds.append(iter([evaluation_seed(base_seed, number) for number in own]))
            first += count
        return seeds

    def _send_live(self, link: Link, group: int, state: _LiveGroup) -> None:
        if state.is_running:
            seeds, draws, running = (x.copy() for x in (state.seeds, state.draws, state.running))
            link.send(group, Observed(0, state.observation, seeds, draws, running))

    def render(self, episodes: list[Episode]) -> list[np.ndarray]:
        """Films of recorded episodes. Raises EnvError where nothing can be rendered."""
        return self.pools.render(episodes)

    # ------------------------------------------------------------------------------------------ device memory

    def offload(self) -> None:
        for env in (*self.train_envs, *self.evaluation_envs):
            env.offload()

    def onload(self) -> None:
        for env in (*self.train_envs, *self.evaluation_envs):
            env.onload()

    # ------------------------------------------------------------------------------------------ resuming

    def state(self) -> dict[str, Any]:
        """Where every env stands; `restore` goes on from there exactly."""
        slots = [slot for env in self.train_envs for slot in env.state()]
        return {
            "draws": self.draws.tolist(),
            "started": self.started,
            "slots": [{**slot, "actions": torch.from_numpy(slot["actions"])} for slot in slots],
            "replaced": self.pools.counted,
        }

    def restore(self, states: list[Any]) -> None:
        """Undo `state`, by replaying the running episodes."""
        own = slice(self.first_env, self.first_env + self.num_envs)
        self.draws = np.array([draw for state in states for draw in state["draws"]][own], np.int64)
        self.started = states[0]["started"]
        slots = [slot for state in states for slot in state["slots"]][own]
        for number, env in enumerate(self.train_envs):
            part = slots[self._rows(number, self.finest)]
            env.restore([{**slot, "actions": slot["actions"].numpy()} for slot in part])
        self.pools.counted = states[self.rank % len(states)]["replaced"]

    def shutdown(self) -> None:
        self.pools.close()


class _LiveGroup:
    """One group of an evaluation: envs that take the next seed as soon as their episode has ended.

    Args:
        parts: [N] which of the iterators in `seeds` each env takes from.
    """

    def __init__(self, env: VectorEnv, parts: np.ndarray, seeds: Sequence[Iterator[int]]) -> None:
        self.env, self._parts, self._seeds = env, parts, seeds
        self.seeds = np.zeros(env.num_envs, np.int64)
        self.draws = np.zeros(env.num_envs, np.int64)
        self.running = np.zeros(env.num_envs, bool)
        self.observation = env.observation()
        self._begin(range(env.num_envs))

    @property
    def is_running(self) -> bool:
        return bool(self.running.any())

    def advance(self, result: ChunkResult) -> list[Episode]:
        """Take in a chunk's outcome; returns the episodes that ended. Lost episodes are begun again."""
        self.observation = result.observation
        lost = np.flatnonzero(result.lost & self.running)
        self._restart(lost, self.seeds[lost])
        done = np.flatnonzero(result.ended & self.running)
        expected = {int(seed) for seed in self.seeds[done]}
        self.running[done] = False
        self._begin(done)
        return [episode for episode in result.episodes if episode.seed in expected]

    def _begin(self, rows: Iterable[int]) -> None:
        given = [(row, next(self._seeds[self._parts[row]], None)) for row in rows]
        pairs = [(row, seed) for row, seed in given if seed is not None]  # fewer than rows at the end
        self._restart([row for row, _ in pairs], [seed for _, seed in pairs])

    def _restart(self, rows: Integers, seeds: Integers) -> None:
        if len(rows):
            self.seeds[rows], self.draws[rows], self.running[rows] = seeds, 0, True
            self.observation = self.env.reset(rows, seeds)
