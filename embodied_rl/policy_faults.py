"""Checks of the policy before a process starts. OpenVLA's checkpoint is looked at, but its weights are not read."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from embodied_rl.build import policy_options
from embodied_rl.config import Config
from embodied_rl.faults import Fault

MODULES = ("timm", "tokenizers", "peft")


def policy_faults(config: Config) -> list[Fault]:
    """What keeps the policy from being built on this machine."""
    return list(_openvla_faults(config)) if config.policy.kind == "openvla" else []


def _openvla_faults(config: Config) -> Iterator[Fault]:
    if missing := [name for name in MODULES if importlib.util.find_spec(name) is None]:
        problem = f"needs {', '.join(missing)}, not installed"
        yield Fault("policy.kind", "openvla", problem, "run: pip install 'embodied-rl[vla]'")
        return
    from policies import openvla

    options = policy_options(config.policy)
    checkpoint = options.pop("checkpoint")
    try:
        settings = openvla.OpenVLASettings.from_options(options)
    except ValueError as error:
        yield Fault("policy.openvla", None, str(error))
        return
    for option, problem in openvla.problems(checkpoint, settings):
        if option == "unnorm_key" and config.sft.data is not None:
            continue  # the statistics of the demonstrations take their place
        key = "lora_targets" if option == "lora" else option
        yield Fault(f"policy.openvla.{key}", getattr(config.policy.openvla, key), problem)
