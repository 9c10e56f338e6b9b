"""What can be evaluated on a LIBERO suite: the scripted expert, random actions, and models by their checkpoint."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.episode_queue import Key
from embodied_rl.protocols import Protocol
from envs.base import Observation
from envs.experts.libero import ADVICE
from envs.libero import ACTIONS
from envs.libero_suites import init_state_id

SCRIPTED = ("expert", "random")


class SuitePolicy(ABC):
    """Acts in the envs of an evaluation.

    Attributes:
        chunk: C, actions in one call.
        observation: what the envs shall produce.
        simulator: further options of the envs.
        fingerprint: what it is, exactly.
    """

    chunk: int
    observation: tuple[str, ...]
    simulator: dict[str, Any]
    fingerprint: dict[str, Any]

    @abstractmethod
    def act(self, observation: Observation, episodes: Sequence[Key], calls: Sequence[int]) -> np.ndarray:
        """Actions float32 [n, C, A] for the observations of n envs.

        Args:
            episodes: that they are in.
            calls: how many there were before in each episode.
        """


class ExpertPolicy(SuitePolicy):
    """The scripted expert of `envs.experts.libero`."""

    chunk, observation, simulator = 1, ("state",), {"expert": True}
    fingerprint = {"name": "expert"}

    def act(self, observation: Observation, episodes: Sequence[Key], calls: Sequence[int]) -> np.ndarray:
        return observation["state"][:, None, -ADVICE:]


class RandomPolicy(SuitePolicy):
    """Uniform actions, drawn for each episode from its own numbers."""

    observation, simulator = ("state",), {}

    def __init__(self, protocol: Protocol, seed: int) -> None:
        self.chunk, self._seed = protocol.chunk, seed
        self.fingerprint = {"name": "random"}

    def act(self, observation: Observation, episodes: Sequence[Key], calls: Sequence[int]) -> np.ndarray:
        draws = [
            np.random.default_rng([self._seed, *episode, call]).uniform(-1, 1, (self.chunk, ACTIONS))
            for episode, call in zip(episodes, calls, strict=True)
        ]
        return np.stack(draws).astype(np.float32)


class ModelPolicy(SuitePolicy):
    """An OpenVLA checkpoint in the published format, or a preset such as `openvla-tiny`.

    Samples, if at all, by random numbers of the episode, so that results do not depend on the number of envs.

    Raises:
        FileNotFoundError, ValueError: as `policies.openvla.load`.
    """

    observation = ("image",)

    def __init__(self, checkpoint: str, protocol: Protocol, suite: str, seed: int, image_size: int) -> None:
        import torch

        from policies import openvla

        self._protocol, self._seed = protocol, seed
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cpu":
            torch.set_num_threads(1)  # the other cores are the env processes'
        known = openvla.read_config(checkpoint).norm_stats
        key = next((name for name in (suite, f"{suite}_no_noops") if name in known), None)
        options: dict[str, Any] = {"unnorm_key": key, "epsilon": protocol.epsilon, "gripper": "libero"}
        if protocol.temperature is not None:
            options["temperature"] = protocol.temperature
        self._policy = openvla.load(checkpoint, **options).to(self._device).eval()
        size = len(self._policy.statistics.low)
        if size != ACTIONS:
            raise ValueError(f"{checkpoint} gives actions of {size} dimensions; LIBERO takes {ACTIONS}")
        self.chunk = 1
        self.simulator = {"image_size": image_size, "cameras": 1}
        self.fingerprint = {"name": checkpoint, "sha256": _content_hash(Path(checkpoint)), **options}

    def act(self, observation: Observation, episodes: Sequence[Key], calls: Sequence[int]) -> np.ndarray:
        import torch

        from policies import SlotNoise

        shown = torch.from_numpy(self._protocol.see(observation["image"])).to(self._device)
        noise = SlotNoise(self._seed, [init_state_id(*episode) for episode in episodes], calls)
        inputs = {"image": shown, "instruction": observation["instruction"]}
        output = self._policy.act(inputs, self._protocol.temperature is None, noise)
        return output.action.cpu().numpy()


def make_policy(name: str, protocol: Protocol, suite: str, seed: int, image_size: int) -> SuitePolicy:
    """The policy that the user names: "expert", "random", a preset or a checkpoint directory."""
    if name == "expert":
        return ExpertPolicy()
    if name == "random":
        return RandomPolicy(protocol, seed)
    return ModelPolicy(name, protocol, suite, seed, image_size)


def _content_hash(directory: Path) -> str | None:
    """SHA-256 of the checkpoint's files; None for a preset."""
    if not directory.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
