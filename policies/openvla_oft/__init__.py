"""OpenVLA-OFT (Kim et al., 2025): OpenVLA that decides on a chunk of actions in one forward pass."""

from policies.openvla_oft.policy import PRESETS, OpenVLAOFTPolicy, adapted_modules, build, load, read_config
from policies.openvla_oft.problems import problems
from policies.openvla_oft.settings import OpenVLAOFTSettings

__all__ = [
    "PRESETS",
    "OpenVLAOFTPolicy",
    "OpenVLAOFTSettings",
    "adapted_modules",
    "build",
    "load",
    "problems",
    "read_config",
]
