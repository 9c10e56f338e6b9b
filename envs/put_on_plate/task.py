"""What a simulation of the Bridge table does beside stepping: pays the reward, chooses episodes, names instructions."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from envs.base import EnvError, Task
from envs.put_on_plate.scenes import SCENES, instruction
from envs.put_on_plate.scoring import PotentialReward


class BridgeTask:
    """One simulated env. Its class has grasps and success in its info, no reward, and resets to numbered episodes.

    Args:
        env: the ManiSkill env object.
        name: its env id.
        object_set: "train", "test" or "all", for the scenes that have them.

    Attributes:
        tasks: all pairs of object and plate of a put-on-plate scene; empty for a scene with one instruction.
    """

    def __init__(self, env: Any, name: str, object_set: str) -> None:
        if env.num_envs > 1:  # the published classes read poses of a whole batch at a reset, or demand one
            raise EnvError(f"{name} resets all envs of a batch at once; simulate each alone: env.sim_backend=cpu")
        if name in SCENES and "phrase" in SCENES[name].choices:
            raise EnvError(f"{name} is not supported: its phrases are known only once an episode has begun")
        self._env, self._in_family, self._object_set = env, name in SCENES, object_set
        self._reward = PotentialReward(1, env.device)
        self.tasks: tuple[Task, ...] = ()
        if self._in_family:
            names = [[entry["name"] for entry in db.values()] for db in (env.model_db_carrot, env.model_db_plate)]
            self.tasks = tuple(Task(text, text) for text in (instruction(*pair) for pair in product(*names)))

    @property
    def task(self) -> int:
        """The number of the current episode's."""
        if not self._in_family:
            return 0
        return int(self._env.select_carrot_ids[0]) * len(self._env.model_db_plate) + int(self._env.select_plate_ids[0])

    def begin(self, seed: int, episode_id: int | None) -> dict[str, Any]:
        """Options of the reset that begins an episode: in a put-on-plate scene, the seed is an episode id too."""
        self._reward.begin(slice(None))
        if episode_id is None and not self._in_family:
            return {}
        chosen = seed if episode_id is None else episode_id
        options = {"episode_id": torch.tensor([chosen], device=self._env.device)}
        return {**options, "obj_set": self._object_set} if self._in_family else options

    def reward(self, info: dict[str, Any]) -> torch.Tensor:
        """What the step with this info has earned, float [1]."""
        return self._reward.step(info["is_src_obj_grasped"], info["consecutive_grasp"], info["success"])
