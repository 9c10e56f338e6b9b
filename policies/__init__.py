"""Policies behind one contract."""

from policies import openvla, openvla_oft
from policies.base import Policy, PolicyOutput, PolicySettings, make
from policies.noise import SlotNoise

__all__ = ["Policy", "PolicyOutput", "PolicySettings", "SlotNoise", "make", "openvla", "openvla_oft"]
