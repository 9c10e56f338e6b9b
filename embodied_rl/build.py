"""From the configuration to what the env and policy packages ask for."""

from __future__ import annotations

from typing import Any

from embodied_rl.config import Config, EnvConfig, PolicyConfig
from envs.base import EnvError, EnvSettings, EnvSpec

SIMULATOR_KEYS = {
    "maniskill": ("control_mode", "reward_mode", "sim_freq", "control_freq", "image_size", "shader", "sim_backend"),
    "libero": ("image_size", "init_states"),
    "gymnasium": (),
}


def env_settings(env: EnvConfig, **simulator: Any) -> EnvSettings:
    """Settings of one env; keyword arguments go to the simulator on top of the config's."""
    own = {key: getattr(env, key) for key in SIMULATOR_KEYS[env.kind]}
    return EnvSettings(
        kind=env.kind,
        id=env.id,
        horizon=env.horizon,
        observation=env.observation,
        instruction=env.instruction,
        reward_scale=env.reward_scale,
        success_bonus=env.success_bonus,
        ignore_terminations=env.ignore_terminations,
        fixed_actions=env.fixed_actions,
        simulator={**own, **simulator},
    )


def policy_options(policy: PolicyConfig) -> dict[str, Any]:
    """The kind's own options: for OpenVLA the checkpoint and the fields of `OpenVLASettings`."""
    if policy.kind != "openvla":
        return policy.model_dump(exclude={"kind", "chunk", "openvla"})
    options = policy.openvla.model_dump()
    rank, alpha, targets = (options.pop(f"lora_{name}") for name in ("rank", "alpha", "targets"))
    return {**options, "lora": rank and {"rank": rank, "alpha": alpha, "targets": targets}}


def require_fit(config: Config, spec: EnvSpec) -> None:
    """Check a policy against what only a started env knows. Raises EnvError."""
    options = config.policy.openvla
    if config.policy.kind != "openvla":
        return
    from policies import openvla
    from policies.action_tokens import action_statistics

    if spec.action.num_choices is not None:
        raise EnvError(f"OpenVLA's actions are continuous, and {config.env.id} has {spec.action.num_choices} choices")
    if (views := spec.image_shape[0] if spec.image_shape else 0) <= options.view:
        raise EnvError(f"policy.openvla.view is {options.view}, and {config.env.id} has {views} cameras, from 0 on")
    if config.sft.data is None:  # else the statistics are those of the demonstrations
        known = openvla.read_config(options.checkpoint, spec.action.size).norm_stats
        given = len(action_statistics(known, options.unnorm_key).low)
        if given != spec.action.size:
            raise EnvError(
                f"the actions of {options.checkpoint} have {given} dimensions, those of {config.env.id} "
                f"{spec.action.size}; choose another policy.openvla.unnorm_key, env.control_mode or env.fixed_actions"
            )


def build_policy(config: Config, spec: EnvSpec) -> Any:
    """The policy for an env, with parameters drawn from the run's seed."""
    import policies

    settings = policies.PolicySettings(
        kind=config.policy.kind,
        state_size=spec.state_size,
        action_low=spec.action.low,
        action_high=spec.action.high,
        num_choices=spec.action.num_choices,
        chunk=config.policy.chunk,
        options=policy_options(config.policy),
    )
    return policies.make(settings, config.seed)
