"""OpenVLA (Kim et al., 2024): a vision-language-action model that answers with action tokens."""

from policies.openvla.policy import OpenVLAPolicy, OpenVLASettings, build, load

__all__ = ["OpenVLAPolicy", "OpenVLASettings", "build", "load"]
