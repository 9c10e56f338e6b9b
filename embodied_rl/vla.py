"""The policies with action tokens that a configuration can ask for, seen alike. Imports no torch before one is used."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from embodied_rl.build import policy_options
from embodied_rl.config import PolicyConfig

if TYPE_CHECKING:
    from policies.openvla import OpenVLASettings
    from policies.openvla.config import OpenVLAConfig
    from policies.openvla.memory import MemoryEstimate

SETTINGS = {"openvla": "OpenVLASettings", "openvla_oft": "OpenVLAOFTSettings"}


@dataclass(frozen=True)
class VLA:
    """A checkpoint, and how it is used.

    Attributes:
        kind: of the policy. Its options are those under `policy.KIND`.
        lacks_weights: what is wrong with a preset that is made of sizes alone.
    """

    kind: str
    checkpoint: str
    settings: OpenVLASettings
    lacks_weights: str | None

    @staticmethod
    def of(policy: PolicyConfig) -> VLA:
        """That of a configuration whose `vla` is not None. Raises ValueError for options that exclude each other."""
        from policies.openvla.presets import missing_weights

        options = policy_options(policy)
        checkpoint = options.pop("checkpoint")
        if policy.kind == "openvla_oft":
            options["chunk"] = policy.chunk
        settings = getattr(_module(policy.kind), SETTINGS[policy.kind]).from_options(options)
        lacks = missing_weights(checkpoint)
        if lacks:  # no data set's name means anything yet
            settings = replace(settings, unnorm_key=None)
        return VLA(policy.kind, checkpoint, settings, lacks)

    def read_config(self, action_size: int = 7, state_size: int = 8) -> OpenVLAConfig:
        """What the checkpoint says of itself; a preset is of the given sizes. Raises as the kind's `read_config`."""
        from policies import openvla, openvla_oft

        if isinstance(self.settings, openvla_oft.OpenVLAOFTSettings):
            return openvla_oft.read_config(self.checkpoint, action_size, state_size, self.settings.layout)
        return openvla.read_config(self.checkpoint, action_size)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Pairs of an option and what is wrong with it, told without reading weights."""
        return _module(self.kind).problems(self.checkpoint, self.settings)

    def written_settings(self) -> dict[str, Any]:
        """What the checkpoint tells of its use: `kind`, and options; empty for a published one, or a preset."""
        from policies.openvla.settings import written_settings

        return written_settings(self.checkpoint)

    def adapted_modules(self) -> list[str]:
        """Names of the modules that would have an adapter."""
        return _module(self.kind).adapted_modules(self.read_config(), self.settings)

    def memory(self, envs: int, micro_batch: int) -> MemoryEstimate:
        """Of acting in so many envs at once, and of learning from so many samples at once."""
        of_one = _memory_of_one_env(self, micro_batch)
        return replace(of_one, keys_values=envs * of_one.keys_values)


@functools.cache
def _memory_of_one_env(vla: VLA, micro_batch: int) -> MemoryEstimate:
    """Takes seconds; a dry run asks for several numbers of envs."""
    memory = importlib.import_module(f"policies.{vla.kind}.memory")
    return memory.estimate_memory(vla.read_config(), vla.settings, 1, micro_batch, vla.settings.prompt_length)


def _module(kind: str) -> ModuleType:
    return importlib.import_module(f"policies.{kind}")
