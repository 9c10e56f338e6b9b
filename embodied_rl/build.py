"""From the configuration to what the env and policy packages ask for."""

from __future__ import annotations

from typing import Any

from embodied_rl.config import Config, EnvConfig, PolicyConfig
from envs import libero, maniskill
from envs.base import EnvError, EnvSettings, EnvSpec

# The keys of a run's `env` that are options of its simulator.
SIMULATOR_KEYS = {
    kind: tuple(key for key in options if key in EnvConfig.model_fields)
    for kind, options in {
        "maniskill": maniskill.SIMULATOR_KEYS,
        "libero": libero.SIMULATOR_KEYS,
        "gymnasium": (),
    }.items()
}


def env_settings(env: EnvConfig, **simulator: Any) -> EnvSettings:
    """Settings of one env; keyword arguments go to the simulator on top of the config's."""
    own = {key: getattr(env, key) for key in SIMULATOR_KEYS.get(env.kind, ())}
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
    """The kind's own options: of one with action tokens, the checkpoint and the fields of its settings but `chunk`."""
    if policy.vla is None:
        return policy.model_dump(exclude={"kind", "chunk", "openvla", "openvla_oft"})
    options = policy.vla.model_dump()
    rank, alpha, targets = (options.pop(f"lora_{name}") for name in ("rank", "alpha", "targets"))
    return {**options, "lora": rank and {"rank": rank, "alpha": alpha, "targets": targets}}


def require_fit(config: Config, spec: EnvSpec) -> None:
    """Check a policy against what only a started env knows. Raises EnvError."""
    options, kind, env = config.policy.vla, config.policy.kind, config.env.id
    if options is None:
        return
    from embodied_rl.vla import VLA

    if spec.action.num_choices is not None:
        raise EnvError(f"OpenVLA's actions are continuous, and {env} has {spec.action.num_choices} choices")
    views = spec.image_shape[0] if spec.image_shape else 0
    for key, last in (("view", options.view), ("more_views", max(getattr(options, "more_views", ()), default=-1))):
        if last >= views:
            raise EnvError(f"policy.{kind}.{key} has camera {last}, and {env} has {views} cameras, from 0 on")
    if config.sft.data is not None:  # then the statistics are those of the demonstrations
        return
    vla = VLA.of(config.policy)
    norm_stats = vla.read_config(spec.action.size, spec.state_size or 0).norm_stats
    sizes = {"action": ("actions", spec.action.size, "env.control_mode or env.fixed_actions")}
    if getattr(options, "proprioception", False):
        sizes["proprio"] = ("states", spec.state_size or 0, "env.id")
    for of, (what, size, others) in sizes.items():
        given = len(vla.settings.statistics(norm_stats, of).low)
        if given != size:
            raise EnvError(
                f"the {what} of {options.checkpoint} have {given} dimensions, those of {env} {size}; choose another "
                f"policy.{kind}.unnorm_key, {others}"
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
