"""Several vector envs as one: the finest groups that a run may be cut into, stepped together where it is cut less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from envs.base import ChunkResult, Integers, Observation, VectorEnv


def join(envs: Sequence[VectorEnv]) -> VectorEnv:
    """One vector env of all rows of `envs`, in their order."""
    return envs[0] if len(envs) == 1 else JoinedVectorEnv(envs)


class JoinedVectorEnv(VectorEnv):
    """Vector envs of the same spec, row under row. Made by `join`."""

    def __init__(self, envs: Sequence[VectorEnv]) -> None:
        self.envs, self.spec = list(envs), envs[0].spec
        self.num_envs = sum(env.num_envs for env in envs)
        edges = np.cumsum([0, *(env.num_envs for env in envs)])
        self._rows = [slice(int(a), int(b)) for a, b in zip(edges, edges[1:], strict=False)]

    def reset(
        self,
        env_ids: Integers | None = None,
        seeds: Integers | None = None,
        init_state_ids: Integers | None = None,
    ) -> Observation:
        wanted = np.arange(self.num_envs) if env_ids is None else np.asarray(env_ids)
        for env, rows in zip(self.envs, self._rows, strict=True):
            mine = np.flatnonzero((wanted >= rows.start) & (wanted < rows.stop))
            if len(mine):
                own = [None if given is None else np.asarray(given)[mine] for given in (seeds, init_state_ids)]
                env.reset(wanted[mine] - rows.start, *own)
        return self.observation()

    def observation(self) -> Observation:
        return self._stack([env.observation() for env in self.envs])

    def chunk_step_async(self, actions: np.ndarray) -> None:
        for env, rows in zip(self.envs, self._rows, strict=True):
            env.chunk_step_async(actions[rows])

    def chunk_step_wait(self) -> ChunkResult:
        results = [env.chunk_step_wait() for env in self.envs]
        joined: dict[str, Any] = {
            name: np.concatenate([getattr(result, name) for result in results])
            for name in ("reward", "terminated", "truncated", "valid", "ended", "lost")
        }
        return ChunkResult(
            observation=self._stack([result.observation for result in results]),
            final_observation=self._final(results),
            episodes=[episode for result in results for episode in result.episodes],
            spans=[span for result in results for span in result.spans],
            **joined,
        )

    def _final(self, results: Sequence[ChunkResult]) -> Observation:
        """Where only some of the envs have final observations, the other rows hold the current ones."""
        if not any(result.ended.any() for result in results):
            return {}
        return self._stack([result.final_observation or result.observation for result in results])

    def state(self) -> list[dict[str, Any]]:
        return [slot for env in self.envs for slot in env.state()]

    def restore(self, state: list[dict[str, Any]]) -> Observation:
        for env, rows in zip(self.envs, self._rows, strict=True):
            env.restore(state[rows])
        return self.observation()

    def offload(self) -> None:
        for env in self.envs:
            env.offload()

    def onload(self) -> None:
        for env in self.envs:
            env.onload()

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _stack(self, parts: Sequence[Observation]) -> Observation:
        first: dict[str, Any] = {**parts[0]}
        for key in first:
            values: list[Any] = [part[key] for part in parts]  # type: ignore[literal-required]
            first[key] = sum(values, []) if key == "instruction" else np.concatenate(values)
        return cast(Observation, first)
