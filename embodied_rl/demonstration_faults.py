"""Checks of the demonstrations that a policy is fine-tuned on, before a process starts. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from embodied_rl.build import env_settings
from embodied_rl.config import Config, EnvConfig
from embodied_rl.demonstrations import DatasetError, Demonstrations, differences
from embodied_rl.faults import Fault

# What may differ between the env of the demonstrations and the one of the run: neither pictures nor actions change.
MAY_DIFFER = ("observation", "horizon", "reward_scale", "success_bonus", "ignore_terminations")
MAY_DIFFER_IN_SIMULATOR = ("reward_mode", "sim_backend", "init_states", "held_out_init_states")


def demonstration_faults(config: Config) -> list[Fault]:
    """What keeps a fine-tuning from starting, besides what keeps any training."""
    faults = []
    if config.policy.vla is None:
        problem = "only policies with action tokens are fine-tuned on demonstrations"
        faults.append(Fault("policy.kind", config.policy.kind, problem, "nearest valid: openvla or openvla_oft"))
    hint = "make some with embodied-rl collect"
    if config.sft.data is None:
        return [*faults, Fault("sft.data", None, "no demonstrations; give their directory as --data DIR", hint)]
    try:
        demonstrations = Demonstrations(Path(config.sft.data))
    except (DatasetError, OSError) as error:
        return [*faults, Fault("sft.data", config.sft.data, str(error), hint)]
    if demonstrations.settings["image_format"] is None:
        hint = "collect them with env.observation=[image]"
        faults.append(Fault("sft.data", config.sft.data, "these demonstrations have no images", hint))
    reads_state = getattr(config.policy.vla, "proprioception", False)
    if reads_state and "proprio" not in demonstrations.statistics:
        hint = "collect them with env.observation=[state, image]"
        faults.append(Fault("sft.data", config.sft.data, "these demonstrations have no states to read", hint))
    if len(demonstrations) < 2:
        problem = "one episode, and at least one is held out to measure on"
        faults.append(Fault("sft.data", config.sft.data, problem, "collect more with --resume --episodes"))
    own, theirs = _shown(asdict(env_settings(config.env))), _shown(demonstrations.settings["env"])
    defaults = env_settings(EnvConfig(kind=config.env.kind)).simulator  # for options that did not exist yet
    missing = {key: defaults[key] for key in own["simulator"] if key in defaults and key not in theirs["simulator"]}
    theirs["simulator"] |= missing
    for difference in differences(theirs, own, "env."):
        problem = f"the demonstrations are of another env: {difference}"
        faults.append(Fault("sft.data", config.sft.data, problem, "collect them with this recipe, or change it"))
    return faults


def unused_demonstrations(config: Config) -> list[Fault]:
    """`sft.data` given to a training that does not read it."""
    if config.sft.data is None:
        return []
    return [Fault("sft.data", config.sft.data, "reinforcement reads no demonstrations", "embodied-rl sft does")]


def _shown(env: dict) -> dict:
    """The part of an env's settings that decides what is seen and what actions do, as JSON has it."""
    simulator = {key: value for key, value in env["simulator"].items() if key not in MAY_DIFFER_IN_SIMULATOR}
    fixed = {str(dim): value for dim, value in env["fixed_actions"].items()}
    shown = {key: value for key, value in env.items() if key not in MAY_DIFFER}
    return {**shown, "simulator": simulator, "fixed_actions": fixed}
