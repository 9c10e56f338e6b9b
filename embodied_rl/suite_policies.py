"""What can be evaluated on a LIBERO suite: the scripted expert, random actions, and models by their checkpoint."""

from __future__ import annotations

import hashlib
import importlib
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

CHUNK = 8  # actions that published models of OpenVLA-OFT decide on at once in LIBERO
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
    """A checkpoint of OpenVLA or OpenVLA-OFT in the published format, or a preset such as `openvla-tiny`.

    Samples, if at all, by random numbers of the episode, so that results do not depend on the number of envs. Of a
    chunk that is longer than the protocol's, the beginning is executed.

    Raises:
        FileNotFoundError, ValueError: as `policies.openvla.load`.
    """

    def __init__(self, checkpoint: str, protocol: Protocol, suite: str, seed: int, image_size: int) -> None:
        import torch

        self._protocol, self._seed = protocol, seed
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cpu":
            torch.set_num_threads(1)  # the other cores are the env processes'
        use = use_of(checkpoint, protocol)
        module = importlib.import_module(f"policies.{use['kind']}")
        options = {name: value for name, value in use.items() if name != "kind"}
        if protocol.temperature is not None:
            options["temperature"] = protocol.temperature
        layout = {"layout": options["layout"]} if "layout" in options else {}
        known = module.read_config(checkpoint, **layout).norm_stats
        options["unnorm_key"] = next((name for name in (suite, f"{suite}_no_noops") if name in known), None)
        self._policy = module.load(checkpoint, **options).to(self._device).eval()
        size = len(self._policy.statistics.low)
        if size != ACTIONS:
            raise ValueError(f"{checkpoint} gives actions of {size} dimensions; LIBERO takes {ACTIONS}")
        self.chunk = min(self._policy.chunk, protocol.chunk)
        self.observation = tuple(key for key in self._policy.processor.reads if key != "instruction")
        self.simulator = {"image_size": image_size, "cameras": 1 + max(self._policy.processor.views)}
        self.fingerprint = {"name": checkpoint, "sha256": _content_hash(Path(checkpoint)), **use, **options}

    def act(self, observation: Observation, episodes: Sequence[Key], calls: Sequence[int]) -> np.ndarray:
        import torch

        from policies import SlotNoise

        shown = torch.from_numpy(self._protocol.see(observation["image"])).to(self._device)
        noise = SlotNoise(self._seed, [init_state_id(*episode) for episode in episodes], calls)
        inputs: dict[str, Any] = {"image": shown, "instruction": observation["instruction"]}
        if "state" in self.observation:
            inputs["state"] = torch.from_numpy(observation["state"]).to(self._device)
        output = self._policy.act(inputs, self._protocol.temperature is None, noise)
        return output.action[:, : self.chunk].cpu().numpy()


def use_of(checkpoint: str, protocol: Protocol) -> dict[str, Any]:
    """The `kind` of a checkpoint and the options that it was trained with: what it says itself, else what the files
    beside its weights and the protocol let one expect."""
    from policies import openvla_oft
    from policies.openvla.settings import written_settings
    from policies.openvla_oft.checkpoint import parts_beside

    if written := written_settings(checkpoint):
        return written
    parts = parts_beside(Path(checkpoint))
    use: dict[str, Any] = {"kind": "openvla", "epsilon": protocol.epsilon, "gripper": "libero"}
    if checkpoint in openvla_oft.PRESETS or (Path(checkpoint).is_dir() and (parts or protocol.at_once)):
        first, *more = protocol.views
        use |= {
            "kind": "openvla_oft",
            "chunk": CHUNK,
            "layout": protocol.layout,
            "head": "l1" if "action_head" in parts else "tokens",
            "view": first,
            "more_views": tuple(more),
            "proprioception": "proprio_projector" in parts,
            "film": "vision_backbone" in parts,
        }
    return use


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
