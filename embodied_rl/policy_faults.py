"""Checks of the policy before a process starts. OpenVLA's checkpoint is looked at, but its weights are not read."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from embodied_rl.config import Config, OpenVLAConfig
from embodied_rl.faults import Fault, show
from embodied_rl.vla import VLA

MODULES = ("timm", "tokenizers", "peft")


def policy_faults(config: Config) -> list[Fault]:
    """What keeps the policy from being built on this machine."""
    options = config.policy.vla
    return [] if options is None else list(_vla_faults(config, options))


def _vla_faults(config: Config, options: OpenVLAConfig) -> Iterator[Fault]:
    kind = config.policy.kind
    if missing := [name for name in MODULES if importlib.util.find_spec(name) is None]:
        problem = f"needs {', '.join(missing)}, not installed"
        yield Fault("policy.kind", kind, problem, "run: pip install 'embodied-rl[vla]'")
        return
    try:
        vla = VLA.of(config.policy)
    except ValueError as error:
        yield Fault(f"policy.{kind}", None, str(error))
        return
    for option, problem in vla.problems():
        if option == "unnorm_key" and config.sft.data is not None:
            continue  # the statistics of the demonstrations take their place
        key = "lora_targets" if option == "lora" else option
        given, lacks = getattr(options, key), problem == vla.lacks_weights
        hint = f"policy.{kind}.checkpoint=DIR" if lacks else ""
        yield Fault(f"policy.{kind}.{key}", given, problem, hint, obtainable=lacks)
    if config.sft.data is None:
        yield from _use_faults(config, vla)


def _use_faults(config: Config, vla: VLA) -> Iterator[Fault]:
    """A checkpoint that tells how it is to be used, used otherwise."""
    sections = {"kind": "policy", "chunk": "policy"}
    own = {**vars(vla.settings), "kind": vla.kind}
    try:
        written = vla.written_settings()
    except ValueError as error:
        yield Fault(f"policy.{vla.kind}.checkpoint", vla.checkpoint, str(error))
        return
    for name in written if written.get("kind") == vla.kind else [name for name in written if name == "kind"]:
        if name not in own:
            problem = f"was trained with {name} {show(written[name])}, which this version does not know"
            yield Fault(f"policy.{vla.kind}.checkpoint", vla.checkpoint, problem)
        elif own[name] != written[name]:
            key = f"{sections.get(name, f'policy.{vla.kind}')}.{name}"
            problem = f"{vla.checkpoint} was trained with {show(written[name])}"
            yield Fault(key, own[name], problem, f"nearest valid: {show(written[name])}")
