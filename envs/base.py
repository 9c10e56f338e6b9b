"""The contracts: `Env`, one simulated env, and `VectorEnv`, many of them stepped chunk by chunk.

Shapes: N envs, C actions in a chunk, A action dimensions, S state size, V camera views, H x W pixels.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

Integers = Sequence[int] | np.ndarray


class EnvError(Exception):
    """A simulator failed; the message says which env, task, seed and step, and what to do."""


class Observation(TypedDict, total=False):
    """What a policy sees. Keys that the env does not provide are absent."""

    state: np.ndarray  # float32 [N, S]
    image: np.ndarray  # uint8 [N, V, H, W, 3]
    instruction: list[str]  # N


@dataclass(frozen=True)
class ActionSpec:
    """Continuous: A dimensions in [low, high]. Discrete: `num_choices` set, one dimension holding the index."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    num_choices: int | None = None

    @property
    def size(self) -> int:
        return len(self.low)


@dataclass(frozen=True)
class Task:
    """What an episode may be about."""

    name: str
    instruction: str


@dataclass(frozen=True)
class EnvSpec:
    """What an env offers, known once one has been made. `image_shape` is (V, H, W, 3).

    `tasks`: of an env with several, among which each episode has one; `instruction` is then the first one's.
    """

    action: ActionSpec
    state_size: int | None
    image_shape: tuple[int, int, int, int] | None
    horizon: int
    instruction: str
    has_success: bool
    tasks: tuple[Task, ...] = ()

    @property
    def instructions(self) -> tuple[str, ...]:
        """The instruction of each task, by its number."""
        return tuple(task.instruction for task in self.tasks) or (self.instruction,)


@dataclass(frozen=True)
class EnvSettings:
    """How to make one env. `simulator` holds what only that kind understands.

    Attributes:
        kind: "maniskill", "libero", "gymnasium", or "module:Class" for a class of your own.
        horizon: env steps until an episode is truncated; None: the env's own limit.
        observation: which of "state" and "image" to produce.
        success_bonus: added to the reward of a step that ends in success, before `reward_scale`.
        ignore_terminations: keep stepping after success or failure, until the horizon.
        fixed_actions: action dimensions held at a value and hidden from the policy.
    """

    kind: str
    id: str
    horizon: int | None = None
    observation: tuple[str, ...] = ("state",)
    instruction: str | None = None
    reward_scale: float = 1.0
    success_bonus: float = 0.0
    ignore_terminations: bool = False
    fixed_actions: dict[int, float] = field(default_factory=dict)
    simulator: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """Outcome of one env step."""

    reward: float
    terminated: bool
    truncated: bool
    success: bool


class Env(ABC):
    """One simulated env, as a simulator module provides it. Episodes, chunks and seeds are handled above it.

    An env with several tasks names them in `tasks`, and in `task` the number of the current episode's.
    """

    action: ActionSpec
    has_success: bool
    horizon: int
    instruction: str
    tasks: tuple[Task, ...] = ()
    task: int = 0

    @abstractmethod
    def reset(self, seed: int, init_state_id: int | None) -> None:
        """Begin the episode that the seed determines, whatever happened before."""

    @abstractmethod
    def step(self, action: np.ndarray, observed: bool) -> Step:
        """Run one action (float32 [A]). `observed` tells whether `observe` is likely to follow."""

    @abstractmethod
    def observe(self) -> dict[str, np.ndarray]:
        """The current observation: `state` [S] and/or `image` [V, H, W, 3]. Rendering happens here."""

    def render(self) -> np.ndarray:
        """A picture for people, uint8 [H, W, 3]."""
        raise EnvError(f"{type(self).__name__} cannot render")

    def close(self) -> None:
        """Free what the process would not free by ending."""


@dataclass(frozen=True)
class Episode:
    """Record of one finished episode. `seed` and `init_state_id` reproduce its start in `env`."""

    env_id: int
    seed: int
    init_state_id: int | None
    task: str
    length: int
    episode_return: float
    success_once: bool
    success_at_end: bool
    actions: np.ndarray | None = None  # float32 [length, A], where recording is on
    env: str = ""  # id


@dataclass
class ChunkResult:
    """Outcome of one chunk step.

    Attributes:
        observation: first observation of the next chunk, after auto-reset.
        reward, terminated, truncated: [N, C].
        valid: [N, C]; sub-steps that were executed. Nothing runs after an episode ends inside a chunk.
        final_observation: last observation of the episodes that ended in this chunk, in the rows of `ended`; empty
            when none did.
        ended: [N]; an episode ended in this chunk.
        lost: [N]; the env's process was replaced: nothing of this chunk happened and its episode is gone. With
            auto-reset its next one has begun, without it the env is frozen.
        episodes: the episodes that ended.
        spans: (process, start, end, cpu) of simulation work: seconds of `time.monotonic`, and processor seconds.
    """

    observation: Observation
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    final_observation: Observation
    ended: np.ndarray
    lost: np.ndarray
    episodes: list[Episode]
    spans: list[tuple[int, float, float, float]] = field(default_factory=list)


class VectorEnv(ABC):
    """Many envs stepped together, chunk by chunk; conventions follow gymnasium's SAME_STEP auto-reset.

    With auto-reset off an env that ended stays frozen, its sub-steps not valid, until it is reset.
    """

    spec: EnvSpec
    num_envs: int

    @abstractmethod
    def reset(
        self,
        env_ids: Integers | None = None,
        seeds: Integers | None = None,
        init_state_ids: Integers | None = None,
    ) -> Observation:
        """Begin new episodes in some envs (default: all); without seeds, each env's own next one."""

    @abstractmethod
    def observation(self) -> Observation:
        """The current observation again."""

    @abstractmethod
    def chunk_step_async(self, actions: np.ndarray) -> None:
        """Begin a chunk step with float32 actions [N, C, A]."""

    @abstractmethod
    def chunk_step_wait(self) -> ChunkResult:
        """Finish the chunk step in flight."""

    def chunk_step(self, actions: np.ndarray) -> ChunkResult:
        """Execute C actions in every env. actions: float32 [N, C, A]."""
        self.chunk_step_async(actions)
        return self.chunk_step_wait()

    @abstractmethod
    def state(self) -> list[dict[str, Any]]:
        """Where each env stands, so that `restore` on a fresh VectorEnv goes on from the same point."""

    @abstractmethod
    def restore(self, state: list[dict[str, Any]]) -> Observation:
        """Go on from `state`, by replaying the running episodes; returns the current observation."""

    def offload(self) -> None:
        """Free the simulator's device memory; a CPU simulator holds none."""

    def onload(self) -> None:
        """Undo `offload`."""

    @abstractmethod
    def close(self) -> None:
        """End the envs."""


KINDS = {
    "maniskill": "envs.maniskill:ManiSkillEnv",
    "libero": "envs.libero:LiberoEnv",
    "gymnasium": "envs.gymnasium:GymnasiumEnv",
}


def make(settings: EnvSettings) -> Env:
    """Make one env of a registered kind, or of a class of your own (an `Env` taking `EnvSettings`) by "module:Class".

    Raises EnvError with what to install or download.
    """
    module, colon, name = KINDS.get(settings.kind, settings.kind).partition(":")
    if not colon:
        raise EnvError(f"unknown env kind '{settings.kind}'; known: {', '.join(KINDS)}, or your own as module:Class")
    try:
        env_class = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise EnvError(f"env kind '{settings.kind}' cannot be imported: {error}") from error
    return env_class(settings)


def episode_seed(base: int, stream: int, number: int) -> int:
    """The seed of an env's n-th training episode: below 2**30, which evaluation never is.

    Envs that share a stream (a GRPO group) share their seeds.
    """
    return int(np.random.SeedSequence([base, stream, number]).generate_state(1)[0]) >> 2


def evaluation_seed(base: int, number: int) -> int:
    """The seed of an evaluation episode: from 2**30, which training never reaches."""
    return 2**30 + (base + number) % 2**30


def is_evaluation_seed(seed: int) -> bool:
    """Whether an evaluation's episode has it, and no training's."""
    return seed >= 2**30
