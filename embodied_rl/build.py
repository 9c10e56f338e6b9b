"""From the configuration to what the env and policy packages ask for."""

from __future__ import annotations

from typing import Any

from embodied_rl.config import Config, EnvConfig
from envs.base import EnvSettings, EnvSpec

SIMULATOR_KEYS = {
    "maniskill": ("control_mode", "reward_mode", "sim_freq", "control_freq", "image_size", "shader", "sim_backend"),
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


def build_policy(config: Config, spec: EnvSpec) -> Any:
    """The policy for an env, with parameters drawn from the run's seed."""
    import policies

    options = config.policy.model_dump(exclude={"kind", "chunk"})
    settings = policies.PolicySettings(
        kind=config.policy.kind,
        state_size=spec.state_size,
        action_low=spec.action.low,
        action_high=spec.action.high,
        num_choices=spec.action.num_choices,
        chunk=config.policy.chunk,
        options=options,
    )
    return policies.make(settings, config.seed)
