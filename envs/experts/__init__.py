"""Scripted experts: controllers that solve a task from the env's state and so make demonstrations.

An expert is a function of the state alone. It keeps no memory of the episode, so that its action is right wherever
the env has got to, by its own action or by a disturbance. Imports without torch or any simulator.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np

from envs.base import EnvError, EnvSettings

EXPERTS = {
    "PushCube-v1": "envs.experts.tabletop:PushCubeExpert",
    "PullCube-v1": "envs.experts.tabletop:PullCubeExpert",
    "PickCube-v1": "envs.experts.tabletop:PickCubeExpert",
    "StackCube-v1": "envs.experts.tabletop:StackCubeExpert",
}


class Expert(ABC):
    """Solves one task.

    Attributes:
        gripper: the action dimension that opens and closes the gripper.
        advice: how many numbers at the end of the state only the expert reads, where `expert_env` adds them.
    """

    gripper: int
    advice = 0

    @abstractmethod
    def act(self, state: np.ndarray) -> np.ndarray:
        """The action, float32 [A] within the env's bounds, for a state observation, float32 [S]."""


def expert_env(settings: EnvSettings) -> EnvSettings:
    """The env in which an expert can act: the same one, which may show it more."""
    if settings.kind != "libero":
        return settings
    return replace(settings, simulator={**settings.simulator, "expert": True})


def make_expert(settings: EnvSettings) -> Expert:
    """The expert for the task of an `expert_env`. Raises EnvError where there is none, or none for its controller."""
    if settings.kind == "libero":
        from envs.experts.libero import LiberoExpert

        return LiberoExpert(settings)
    if settings.kind != "maniskill" or settings.id not in EXPERTS:
        known = ", ".join(EXPERTS)
        raise EnvError(f"there is no scripted expert for {settings.id}; there is one for {known} and for LIBERO")
    module, _, name = EXPERTS[settings.id].partition(":")
    expert: Expert = getattr(importlib.import_module(module), name)(settings)
    return expert
