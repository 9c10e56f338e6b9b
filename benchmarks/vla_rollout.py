"""Env steps per second of a VLA's rollout: pipelined (S = 1, 2, 4, and the planner's choice) and as a plain loop.

    python benchmarks/vla_rollout.py                     # some minutes on two cores

The plain loop is what most training code does: all envs step, then one call of the policy infers all of them, those
whose episode has ended too. It has the same env processes, shared memory, envs, model and episodes; only nothing
overlaps. Both run whole episodes without auto-reset, as GRPO does. What the planner would make of eight devices is
simulated from the measured costs. Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import yaml

from embodied_rl.build import build_policy, env_settings
from embodied_rl.config import Config
from embodied_rl.data import RolloutReport
from embodied_rl.planning import planned_flow
from embodied_rl.team import Team
from envs.pool import EnvPool
from policies import SlotNoise
from scheduler.cluster import Cluster
from scheduler.placement import parse_placement
from scheduler.plan import Plan, make_plan
from scheduler.profile import Profile

SETTLE = 8  # iterations after which the plan is the chosen one
SETTINGS: dict[str, Any] = {
    "env": {
        "kind": "maniskill", "id": "PushCube-v1", "control_mode": "pd_ee_delta_pos", "fixed_actions": {3: -1.0},
        "observation": ["image"], "num_envs": 16, "horizon": 12, "sim_freq": 50, "control_freq": 5, "mesh_detail": 0.01,
    },
    "policy": {"kind": "openvla"},
    "rollout": {"steps": 12, "pipeline_stages": "auto"},
    "algorithm": {"name": "grpo", "group_size": 4, "epochs": 1, "minibatches": 1},
    "cluster": {"cpu_slots": 2},
    "deterministic": True,
    "inference_block": 4,
}  # fmt: skip


def plain_loop(config: Config, repetitions: int, threads: int) -> tuple[float, float]:
    """Env steps per second without any overlap, and the share of the time that the policy takes."""
    torch.set_num_threads(threads)
    envs, steps = config.env.num_envs, config.rollout.steps
    pool = EnvPool(2)
    env = pool.vector_env(
        env_settings(config.env), range(envs), group_size=config.algorithm.group_size, auto_reset=False
    )
    policy = build_policy(config, env.spec).eval()
    rates, shares = [], []
    for repetition in range(repetitions + 1):
        observation, done, inferring = env.reset(), 0, 0.0
        start = time.monotonic()
        for step in range(steps):
            begun = time.monotonic()
            tensors = {key: torch.as_tensor(x) if isinstance(x, np.ndarray) else x for key, x in observation.items()}
            noise = SlotNoise(config.seed, np.arange(envs), np.full(envs, repetition * steps + step))
            action = policy.act(policy.prepare(tensors), False, noise).action.numpy()
            inferring += time.monotonic() - begun
            result = env.chunk_step(action)
            observation, done = result.observation, done + int(result.valid.sum())
        seconds = time.monotonic() - start
        if repetition:  # the first one warms up
            rates.append(done / seconds)
            shares.append(inferring / seconds)
    pool.close()
    return statistics.median(rates), statistics.median(shares)


def pipelined(config: Config, repetitions: int) -> tuple[dict[str, float], Profile]:
    """Env steps per second of rollouts by number of pipeline groups and for the planner's choice; and the profile."""
    rates: dict[str, float] = {}
    with Cluster(cpu_slots=2) as cluster:
        profile = Profile()
        team = Team(config, cluster, profile=profile)
        team.sync_weights()

        def rate(iterate: Callable[[], RolloutReport]) -> float:
            iterate()
            reports = [iterate() for _ in range(repetitions)]
            return statistics.median(report.env_steps / report.seconds for report in reports)

        def under_the_present_plan() -> RolloutReport:
            return RolloutReport.merge(team.schedule.executor.iterate().reports["env.rollout"])

        for number in range(SETTLE):
            team.iterate(number, left=1000)
        chosen = team.schedule.executor.plan
        assert chosen is not None
        (loop,) = chosen.loop_groups
        name = f"planned: {chosen.placement_text}, S = {chosen.loop_groups[loop]}"
        rates[name] = rate(under_the_present_plan)
        for groups in config.pipeline_choices:
            team.schedule.executor.cut({loop: groups}, {})
            rates[f"S = {groups}"] = rate(under_the_present_plan)
        team.close()
    return rates, profile


def on_eight_devices(config: Config, profile: Profile) -> tuple[Plan, Plan]:
    """Plans of an iteration of 8 times the envs on 8 devices as fast as these: the plain order, and the best one."""
    flow, items = planned_flow(config), 4 * config.env.num_envs
    everything = parse_placement("env, rollout, actor: all", 8, flow.groups())
    plain = Plan.from_placement(flow, everything, profile, items, 8)
    (loop,) = plain.loop_groups
    return plain.with_groups(loop, 1).repriced(profile), make_plan(flow, profile, 8, items)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="rollouts whose median is taken")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the configuration")
    options = parser.parse_args()
    config = Config.model_validate_json(json.dumps(SETTINGS))
    for override in options.overrides:
        key, _, value = override.partition("=")
        config = with_value(config, key, yaml.safe_load(value))
    plain = {threads: plain_loop(config, options.repetitions, threads) for threads in (1, 2)}
    base = max(rate for rate, _ in plain.values())
    print(f"{'env steps/s':>11} {'of the plain loop':>18}")
    for threads, (rate, share) in plain.items():
        print(
            f"{rate:>11.1f} {rate / base:>17.2f}x  plain loop, {threads} thread(s), {share:.0%} of it inference",
            flush=True,
        )
    rates, profile = pipelined(config, options.repetitions)
    for name, rate in rates.items():
        print(f"{rate:>11.1f} {rate / base:>17.2f}x  {name}")
    share = plain[1][1]
    print(f"bound on 2 cores: {1 / (share / 2 + 1 - share):.2f}x the loop of one thread, if nothing ever waits")
    first, best = on_eight_devices(config, profile)
    print(
        f"8 devices, simulated: {first.predicted_s:.3g} s plain, {best.predicted_s:.3g} s ({best.placement_text}), "
        f"{first.predicted_s / best.predicted_s:.2f}x"
    )


def with_value(config: Config, key: str, value: Any) -> Config:
    """The configuration with one key changed."""
    content = config.model_dump(mode="json")
    section = content
    *path, last = key.split(".")
    for name in path:
        section = section[name]
    section[last] = value
    return Config.model_validate_json(json.dumps(content))


if __name__ == "__main__":
    main()
