"""The golden data of OpenVLA-OFT, and policies on its model."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from openvla_golden import TINY, observation, tensors
from torch import Tensor

from policies import openvla_oft
from policies.openvla_oft import OpenVLAOFTPolicy

LIBERO = "libero_golden_no_noops"
STATE_SIZE = 8


def golden(name: str, regime: str = "bidir") -> Tensor:
    """A tensor of the bidirectional or the causal run."""
    return tensors(f"oft_{regime}.safetensors")[name]


def extra_weights(module: str) -> dict[str, Tensor]:
    """What OFT adds to the model, without the name of the module."""
    weights = tensors("oft_extra_weights.safetensors")
    return {key.removeprefix(f"{module}."): value for key, value in weights.items() if key.startswith(f"{module}.")}


def write_side_files(directory: Path, prefix: str = "") -> None:
    """The files of an L1 head, a projector and FiLM beside a checkpoint; names may begin with DDP's `module.`."""
    parts = {"vision_backbone": {f"vision_backbone.{key}": value for key, value in film_backbone().items()}}
    parts |= {name: extra_weights(name) for name in ("action_head", "proprio_projector")}
    for name, state in parts.items():
        state = {f"{prefix}{key}": value for key, value in state.items()}
        torch.save(state, directory / f"{name}--150000_checkpoint.pt")


def film_backbone() -> dict[str, Tensor]:
    """The vision backbone of the model, its blocks wrapped as in a file beside it."""
    plain = openvla_oft.load(TINY, unnorm_key=LIBERO).network.vision_backbone.state_dict()
    wrapped = {wrap(key): value for key, value in plain.items()}
    return wrapped | {key.removeprefix("vision_backbone."): value for key, value in extra_weights("film").items()}


def wrap(key: str) -> str:
    """`featurizer.blocks.0.norm1.weight` -> `featurizer.blocks.0.block.norm1.weight`."""
    tower, _, rest = key.partition(".blocks.")
    index, _, name = rest.partition(".")
    return f"{tower}.blocks.{index}.block.{name}" if rest else key


@functools.cache
def full_checkpoint() -> Path:
    """The golden model with all files that may stand beside it."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory)
    shutil.copytree(TINY, directory, dirs_exist_ok=True)
    write_side_files(directory)
    return directory


@functools.cache
def golden_oft(**options: Any) -> OpenVLAOFTPolicy:
    """A policy on the golden model; not to be changed."""
    return openvla_oft.load(full_checkpoint(), **{"unnorm_key": LIBERO, **options}).eval()


def regression(**options: Any) -> OpenVLAOFTPolicy:
    """The published recipe: L1 head, two cameras, the state."""
    return golden_oft(head="l1", more_views=(1,), proprioception=True, **options)


def full_observation(count: int = 8, views: int = 2) -> dict[str, Any]:
    """Random images of several cameras, prompts of unequal lengths, and states in the range of the data set."""
    seen = observation(count)
    image = torch.cat([observation(count, seed)["image"] for seed in range(views)], dim=1)
    low, high = (torch.tensor(x) for x in ([-0.41, -0.31, 0.87], [0.19, 0.33, 1.29]))
    state = torch.rand(count, STATE_SIZE, generator=torch.Generator().manual_seed(1))
    state[:, :3] = low + (high - low) * state[:, :3]
    return {**seen, "image": image, "state": state}
