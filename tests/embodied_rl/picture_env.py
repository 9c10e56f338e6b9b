"""A gymnasium env for tests of policies that see: a bright square shows the action that is wanted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from embodied_rl.build import env_settings
from embodied_rl.config import Config
from embodied_rl.demonstrations import DemonstrationWriter, EpisodeInfo, Trajectory

ID = "picture_env:Picture-v0"
SIZE, HORIZON = 56, 4
ENV = {"kind": "gymnasium", "id": ID, "observation": ["image"], "num_envs": 4, "processes": 1, "horizon": HORIZON}


class Picture(gymnasium.Env):
    """The reward is the distance of the action [2] to the square's place, negated; near it is success."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._show(), {"success": False}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        distance = float(np.linalg.norm(action - self.place))
        return self._show(), -distance, False, False, {"success": distance < 0.3}

    def _show(self) -> np.ndarray:
        self.place = self.np_random.choice([-0.7, 0.0, 0.7], 2).astype(np.float32)
        return self.place

    def render(self) -> np.ndarray:
        image = np.zeros((SIZE, SIZE, 3), np.uint8)
        row, column = ((self.place + 1) / 2 * (SIZE - 12)).astype(int)
        image[row : row + 12, column : column + 12] = 255
        return image


gymnasium.register("Picture-v0", Picture, max_episode_steps=HORIZON)


def write_demonstrations(path: Path, config: Config, episodes: int = 12) -> None:
    """A dataset of episodes in which every action is right."""
    env = Picture("rgb_array")
    settings = {"env": asdict(env_settings(config.env)), "image_format": "png", "gripper": None}
    with DemonstrationWriter(path, settings) as writer:
        for number in range(episodes):
            places, images = [env.reset(seed=number)[0]], [env.render()]
            for _ in range(HORIZON):
                places.append(env.step(places[-1])[0])
                images.append(env.render())
            actions = np.stack(places[:-1])
            writer.write(number, Trajectory(actions, actions, None, np.stack(images)[:, None]))
            writer.index(EpisodeInfo(number, number, HORIZON, True, 0.0, "touch the square", True))
        writer.complete()
