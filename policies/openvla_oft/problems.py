"""What keeps a checkpoint from being used as the options say, told without reading its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from policies.openvla.presets import missing_weights
from policies.openvla.problems import EXPECTED, failures, shared_checks
from policies.openvla_oft.checkpoint import check_side_files
from policies.openvla_oft.model import OpenVLAOFT
from policies.openvla_oft.policy import PRESETS, adapted_modules, module_sizes, read_config
from policies.openvla_oft.settings import OpenVLAOFTSettings


def problems(checkpoint: str, settings: OpenVLAOFTSettings) -> Iterator[tuple[str, str]]:
    """Pairs of the option at fault, `checkpoint` or a field of `OpenVLAOFTSettings`, and what is wrong.

    The network is built on the meta device, where it takes no memory; of weights, names and shapes are read.
    """
    try:
        config = read_config(checkpoint, layout=settings.layout)
    except EXPECTED as error:
        yield "checkpoint", str(error)
        return
    directory = None if checkpoint in PRESETS else Path(checkpoint)
    if problem := missing_weights(checkpoint):
        yield "checkpoint", problem
    try:
        sizes = module_sizes(config, settings)
    except EXPECTED as error:
        yield "unnorm_key", str(error)
        return

    def side_files() -> None:
        if directory is not None:
            with torch.device("meta"):
                network = OpenVLAOFT(config, settings)
                names = network.add_modules(*sizes)
            check_side_files(network, names, directory)

    yield from failures([*shared_checks(config, directory, settings, adapted_modules), ("checkpoint", side_files)])
