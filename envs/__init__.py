"""Simulators behind one vector-env contract. Imports without torch, Ray or any simulator."""

from envs.base import (
    ActionSpec,
    ChunkResult,
    Env,
    EnvError,
    EnvSettings,
    EnvSpec,
    Episode,
    Observation,
    VectorEnv,
    make,
)

__all__ = [
    "ActionSpec",
    "ChunkResult",
    "Env",
    "EnvError",
    "EnvSettings",
    "EnvSpec",
    "Episode",
    "Observation",
    "VectorEnv",
    "make",
]
