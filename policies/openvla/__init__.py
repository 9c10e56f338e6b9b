"""OpenVLA (Kim et al., 2024): a vision-language-action model that answers with action tokens."""

from policies.openvla.action_policy import ActionTokenPolicy
from policies.openvla.policy import OpenVLAPolicy, adapted_modules, build, load, read_config
from policies.openvla.problems import problems
from policies.openvla.settings import OpenVLASettings

__all__ = [
    "ActionTokenPolicy",
    "OpenVLAPolicy",
    "OpenVLASettings",
    "adapted_modules",
    "build",
    "load",
    "problems",
    "read_config",
]
