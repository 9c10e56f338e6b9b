"""The arrays of one chunk step, in plain or in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envs.base import ChunkResult, EnvSpec, Episode, Observation


class ChunkBuffers:
    """Arrays over one piece of memory, laid out alike by everyone who maps it. `rows` selects a view of some envs."""

    action: np.ndarray  # float32 [N, C, A]
    reward: np.ndarray  # float32 [N, C]
    terminated: np.ndarray  # bool [N, C]
    truncated: np.ndarray  # bool [N, C]
    valid: np.ndarray  # bool [N, C]
    state: np.ndarray  # float32 [N, S]
    final_state: np.ndarray  # float32 [N, S]
    image: np.ndarray  # uint8 [N, V, H, W, 3]
    final_image: np.ndarray  # uint8 [N, V, H, W, 3]
    task: np.ndarray  # int64 [N]; number of the current episode's task
    final_task: np.ndarray  # int64 [N]
    episode_number: np.ndarray  # int64 [N]; episodes begun
    episode_seed: np.ndarray  # int64 [N]
    episode_step: np.ndarray  # int64 [N]; steps done in the current episode
    running: np.ndarray  # bool [N]; an episode has begun and not ended
    began: np.ndarray  # bool [N]; was running when the chunk in flight was begun
    busy: np.ndarray  # bool [N]; being stepped or reset at this moment: who is to blame when the process dies
    skip: np.ndarray  # bool [N]; left alone in this chunk, because its action was meant for a lost episode
    chunks: np.ndarray  # int64 [N]; chunk steps done so far
    steps: np.ndarray  # int64 [N]; env steps done in them

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self.__dict__.update(arrays)

    @staticmethod
    def allocate(spec: EnvSpec, num_envs: int, chunk: int) -> ChunkBuffers:
        """Zeroed buffers in this process's own memory."""
        return ChunkBuffers.over(bytearray(ChunkBuffers.size(spec, num_envs, chunk)), spec, num_envs, chunk)

    @staticmethod
    def size(spec: EnvSpec, num_envs: int, chunk: int) -> int:
        """Bytes that `over` needs."""
        return sum(_padded(shape, dtype) for _, shape, dtype in _fields(spec, num_envs, chunk))

    @staticmethod
    def over(memory: object, spec: EnvSpec, num_envs: int, chunk: int) -> ChunkBuffers:
        """Buffers over given memory (a writable buffer of at least `size` bytes)."""
        arrays, offset = {}, 0
        for name, shape, dtype in _fields(spec, num_envs, chunk):
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(memory, dtype, count, offset).reshape(shape)  # type: ignore[call-overload]
            offset += _padded(shape, dtype)
        return ChunkBuffers(arrays)

    def rows(self, first: int, last: int) -> ChunkBuffers:
        """A view of envs first to last - 1."""
        return ChunkBuffers({name: array[first:last] for name, array in self.arrays.items()})

    def clear(self) -> None:
        """Forget the last chunk's outcome, not the observations."""
        for array in (self.reward, self.terminated, self.truncated, self.valid):
            array[:] = 0

    def observation(self, instructions: Sequence[str]) -> Observation:
        """A copy of the current observation. `instructions`: of each task, by its number."""
        return self._observation("", instructions)

    def result(
        self, instructions: Sequence[str], episodes: list[Episode], lost: np.ndarray | None = None
    ) -> ChunkResult:
        """A copy of the last chunk's outcome."""
        ended = (self.terminated | self.truncated).any(axis=1)
        return ChunkResult(
            observation=self.observation(instructions),
            reward=self.reward.copy(),
            terminated=self.terminated.copy(),
            truncated=self.truncated.copy(),
            valid=self.valid.copy(),
            final_observation=self._observation("final_", instructions) if ended.any() else {},
            ended=ended,
            lost=np.zeros(len(self.reward), bool) if lost is None else lost,
            episodes=episodes,
        )

    def _observation(self, prefix: str, instructions: Sequence[str]) -> Observation:
        observation: Observation = {"instruction": [instructions[task] for task in self.arrays[f"{prefix}task"]]}
        if self.arrays["state"].size:
            observation["state"] = self.arrays[f"{prefix}state"].copy()
        if self.arrays["image"].size:
            observation["image"] = self.arrays[f"{prefix}image"].copy()
        return observation


def _fields(spec: EnvSpec, n: int, c: int) -> list[tuple[str, tuple[int, ...], type]]:
    state, image = (n, spec.state_size or 0), (n, *(spec.image_shape or (0, 0, 0, 3)))
    return [
        ("action", (n, c, spec.action.size), np.float32),
        ("reward", (n, c), np.float32),
        ("terminated", (n, c), np.bool_),
        ("truncated", (n, c), np.bool_),
        ("valid", (n, c), np.bool_),
        ("state", state, np.float32),
        ("final_state", state, np.float32),
        ("image", image, np.uint8),
        ("final_image", image, np.uint8),
        ("task", (n,), np.int64),
        ("final_task", (n,), np.int64),
        ("episode_number", (n,), np.int64),
        ("episode_seed", (n,), np.int64),
        ("episode_step", (n,), np.int64),
        ("running", (n,), np.bool_),
        ("began", (n,), np.bool_),
        ("busy", (n,), np.bool_),
        ("skip", (n,), np.bool_),
        ("chunks", (n,), np.int64),
        ("steps", (n,), np.int64),
    ]


def _padded(shape: tuple[int, ...], dtype: type) -> int:
    return -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64
