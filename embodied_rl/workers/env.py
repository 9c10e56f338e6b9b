"""EnvWorker: hosts envs and streams env-step chunks into policy inference.

Each of its S pipeline stages is a vector env of its own; while the policy looks at one stage, another is stepped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from embodied_rl.build import env_settings
from embodied_rl.config import Config
from embodied_rl.data import Observed, RolloutReport, StreamId
from envs.base import ChunkResult, EnvSpec, Episode, Integers, Observation, VectorEnv, evaluation_seed
from envs.maniskill import uses_gpu
from envs.maniskill_gpu import ManiSkillBatch
from envs.pool import EnvPool
from envs.slots import VectorArgs
from scheduler.channel import Channel
from scheduler.worker import Worker


class EnvWorker(Worker):
    """Owns the share of the run's envs that falls to its rank."""

    def __init__(self, config: Config) -> None:
        self.config = config
        per_rank = config.env.num_envs // self.world_size
        self.stages = config.rollout.pipeline_stages
        self.first_env = self.rank * per_rank
        self.per_stage = per_rank // self.stages
        self.grouped = config.algorithm.name == "grpo"
        self.settings = env_settings(config.env)
        self.on_gpu = uses_gpu(self.settings, self.context.device_kind)
        processes = 0 if self.on_gpu else config.env.processes or len(self.devices)
        self.pool = EnvPool(processes, config.env.step_timeout_s)
        self.train_envs = [self._make(stage) for stage in range(self.stages)]
        self.evaluation_envs: list[VectorEnv] = []
        self.draws = np.zeros((self.stages, self.per_stage), np.int64)
        self.started = False

    def _make(self, stage: int, evaluates: bool = False) -> VectorEnv:
        args: dict[str, Any] = {
            "settings": self.settings,
            "env_ids": tuple(self._slots(stage)),
            "chunk": self.config.policy.chunk,
            "seed": self.config.seed,
            "group_size": self.config.algorithm.group_size if self.grouped else 1,
            "auto_reset": not (evaluates or self.grouped),
            "record_actions": evaluates,
        }
        return ManiSkillBatch(VectorArgs(**args)) if self.on_gpu else self.pool.vector_env(**args)

    def _slots(self, stage: int) -> range:
        first = self.first_env + stage * self.per_stage
        return range(first, first + self.per_stage)

    def spec(self) -> EnvSpec:
        """What the envs offer."""
        return self.train_envs[0].spec

    def process_ids(self) -> list[int]:
        """The env processes, for monitoring."""
        return self.pool.pids

    # ------------------------------------------------------------------------------------------ rollout

    def rollout(self, observations: Channel, actions: Channel, receivers: int) -> RolloutReport:
        """Step every stage through one rollout, feeding `receivers` rollout workers.

        Per stage T + 1 `Observed` go out (the last one only closes the rollout) and T chunks of actions come in.
        """
        start = time.monotonic()
        report, busy = RolloutReport(), 0.0
        for stage, env in enumerate(self.train_envs):
            fresh = self.grouped or not self.started
            self._send(observations, receivers, stage, 0, env.reset() if fresh else env.observation())
        self.started = True
        for step in range(self.config.chunk_steps + 1):
            for stage, env in enumerate(self.train_envs):
                if step > 0:
                    result = self._finish_chunk(env, stage)
                    busy += sum(end - begin for _, begin, end in result.spans)
                    report.episodes += result.episodes
                    report.env_steps += int(result.valid.sum())
                    self._send(observations, receivers, stage, step, result.observation, result)
                if step < self.config.chunk_steps:
                    env.chunk_step_async(self._await_action(actions, stage))
                    self.draws[stage] += 1
        report.seconds = time.monotonic() - start
        report.busy_fraction = busy / (max(1, len(self.pool.processes)) * report.seconds)
        report.replaced_processes, report.lost_episodes = self.pool.replaced, self.pool.lost_episodes
        return report

    def _await_action(self, actions: Channel, stage: int) -> np.ndarray:
        with self.trace.span("wait for action", "wait", stage=stage):
            return actions.get(key=StreamId(self.rank, stage).key)

    def _finish_chunk(self, env: VectorEnv, stage: int) -> ChunkResult:
        result = env.chunk_step_wait()
        for process, start, end in result.spans:
            self.trace.add("chunk step", start, end, track=f"{self.context.name}.p{process}", stage=stage)
        return result

    def _send(
        self,
        observations: Channel,
        receivers: int,
        stage: int,
        step: int,
        observation: Observation,
        outcome: ChunkResult | None = None,
    ) -> None:
        slots, draws = np.array(self._slots(stage), np.int64), self.draws[stage].copy()
        message = Observed(StreamId(self.rank, stage), step, observation, slots, draws, outcome)
        observations.put(message, key=self._receiver(stage, receivers))

    def _receiver(self, stage: int, receivers: int) -> int:
        """The rollout worker that serves a stage, always the same one: it gathers the stage's trajectories."""
        return (self.rank * self.stages + stage) % receivers

    # ------------------------------------------------------------------------------------------ evaluation

    def evaluate(
        self, observations: Channel, actions: Channel, receivers: int, episodes: int, base_seed: int
    ) -> list[Episode]:
        """Run this rank's share of `episodes`, each seed once; the episodes, with their actions, by seed."""
        if not self.evaluation_envs:
            self.evaluation_envs = [self._make(stage, evaluates=True) for stage in range(self.stages)]
        seeds = iter([evaluation_seed(base_seed, i) for i in range(self.rank, episodes, self.world_size)])
        finished: list[Episode] = []
        live = [_LiveStage(env, seeds) for env in self.evaluation_envs]
        for stage, state in enumerate(live):
            self._send_live(observations, receivers, stage, state)
        while any(state.is_running for state in live):
            for stage, state in enumerate(live):
                if state.is_running:
                    state.env.chunk_step_async(self._await_action(actions, stage))
                    state.draws += 1
            for stage, state in enumerate(live):
                if state.is_running:
                    finished += state.advance(self._finish_chunk(state.env, stage), seeds)
                    self._send_live(observations, receivers, stage, state)
        for receiver in range(receivers):
            observations.put(None, key=receiver)
        return sorted(finished, key=lambda episode: episode.seed)

    def _send_live(self, observations: Channel, receivers: int, stage: int, state: _LiveStage) -> None:
        if state.is_running:
            stream = StreamId(self.rank, stage)
            message = Observed(stream, 0, state.observation, state.seeds.copy(), state.draws.copy())
            observations.put(message, key=self._receiver(stage, receivers))

    def render(self, episodes: list[Episode]) -> list[np.ndarray]:
        """Films of recorded episodes. Raises EnvError where nothing can be rendered."""
        return self.pool.render(env_settings(self.config.env, render=True), episodes)

    # ------------------------------------------------------------------------------------------ resuming

    def save(self) -> dict[str, Any]:
        """Where every env stands; `load` goes on from there exactly."""
        return {
            "draws": self.draws.tolist(),
            "started": self.started,
            "stages": [
                [{**slot, "actions": torch.from_numpy(slot["actions"])} for slot in env.state()]
                for env in self.train_envs
            ],
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Undo `save`, by replaying the running episodes."""
        self.draws, self.started = np.array(saved["draws"], np.int64), saved["started"]
        for env, state in zip(self.train_envs, saved["stages"], strict=True):
            env.restore([{**slot, "actions": slot["actions"].numpy()} for slot in state])

    def shutdown(self) -> None:
        self.pool.close()


class _LiveStage:
    """One stage of an evaluation: envs that take the next seed as soon as their episode has ended."""

    def __init__(self, env: VectorEnv, seeds: Iterator[int]) -> None:
        self.env = env
        self.seeds = np.zeros(env.num_envs, np.int64)
        self.draws = np.zeros(env.num_envs, np.int64)
        self.running = np.zeros(env.num_envs, bool)
        self.observation = env.observation()
        self._begin(range(env.num_envs), seeds)

    @property
    def is_running(self) -> bool:
        return bool(self.running.any())

    def advance(self, result: ChunkResult, seeds: Iterator[int]) -> list[Episode]:
        """Take in a chunk's outcome; returns the episodes that ended. Lost episodes are begun again."""
        self.observation = result.observation
        lost = np.flatnonzero(result.lost & self.running)
        self._restart(lost, self.seeds[lost])
        done = np.flatnonzero(result.ended & self.running)
        expected = {int(seed) for seed in self.seeds[done]}
        self.running[done] = False
        self._begin(done, seeds)
        return [episode for episode in result.episodes if episode.seed in expected]

    def _begin(self, rows: Iterable[int], seeds: Iterator[int]) -> None:
        pairs = list(zip(rows, seeds))  # noqa: B905  (fewer seeds than rows at the end)
        self._restart([row for row, _ in pairs], [seed for _, seed in pairs])

    def _restart(self, rows: Integers, seeds: Integers) -> None:
        if len(rows):
            self.seeds[rows], self.draws[rows], self.running[rows] = seeds, 0, True
            self.observation = self.env.reset(rows, seeds)
