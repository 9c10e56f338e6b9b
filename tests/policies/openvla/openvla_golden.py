"""The golden data, read once, and policies on its model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from policies import openvla
from policies.openvla import OpenVLAPolicy

torch.set_num_threads(1)

DATA = Path(__file__).resolve().parents[2] / "data" / "golden" / "openvla"
TINY = DATA / "tiny"
ACTION_IDS = 31744


@functools.cache
def tensors(name: str) -> dict[str, Tensor]:
    """The content of a .safetensors or .npz file, and its copy."""
    if name.endswith(".npz"):
        return {key: torch.from_numpy(value) for key, value in np.load(DATA / name).items()}
    return {key: value.clone() for key, value in load_file(DATA / name).items()}


def sample(index: int) -> dict[str, Tensor]:
    """One of the two samples of the forward data, without its prefix."""
    prefix = f"s{index}."
    return {key[3:]: value for key, value in tensors("openvla_forward.safetensors").items() if key.startswith(prefix)}


@functools.cache
def golden_policy(**options: Any) -> OpenVLAPolicy:
    """A policy on the golden model; not to be changed."""
    return openvla.load(TINY, **{"unnorm_key": "libero_golden_no_noops", **options}).eval()


def observation(count: int = 8, seed: int = 0) -> dict[str, Any]:
    """Random images, and prompts of unequal lengths."""
    words = ("pick up the bowl", "open the drawer", "push", "put the red mug on the white plate and close the drawer")
    image = torch.randint(256, (count, 1, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return {"image": image, "instruction": [words[i % len(words)] + " now" * (i // len(words)) for i in range(count)]}


def rows(values: dict[str, Any], which: slice) -> dict[str, Any]:
    """Some of the envs of an observation."""
    return {key: value[which] for key, value in values.items()}
