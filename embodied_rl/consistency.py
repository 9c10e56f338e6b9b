"""Checks between keys of a configuration, each answered with the nearest valid values. Needs no simulator."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from typing import Literal

from embodied_rl.build import SIMULATOR_KEYS
from embodied_rl.config import Config, EnvConfig, PolicyConfig
from embodied_rl.faults import Fault, any_of, nearest_divisors, nearest_multiples, show
from embodied_rl.mixture import env_parts
from scheduler.placement import local_device_count, parse_placement

GROUPS = ("actor", "rollout", "env")
SIMULATOR_TITLES = {"maniskill": "ManiSkill", "libero": "LIBERO"}
VLA_TITLES = {"openvla": "OpenVLA", "openvla_oft": "OpenVLA-OFT"}
MLP_KEYS = ("hidden", "log_std", "normalise_observations", "observation_clip")

# A fault, and the keys that the check read: it is void if one of them was not understood.
Finding = tuple[tuple[str, ...], Fault]


def consistency_faults(config: Config, defaulted: Collection[str] = ()) -> list[Fault]:
    """Faults between keys; checks that involve a key in `defaulted` are left out."""
    checks = (
        _env_counts,
        _actor_shares,
        _pipeline,
        _steps,
        _batches,
        _algorithm,
        _critic_and_filter,
        _evaluation,
        _observation,
        _critic_of_state,
        _policy,
        _simulator_keys,
        _placement,
    )
    return [fault for check in checks for keys, fault in check(config) if not set(keys) & set(defaulted)]


def visible_devices(config: Config) -> tuple[int, Literal["cpu", "gpu"]] | None:
    """The number and kind of this machine's devices; None (unknown) if the run joins a cluster."""
    if config.cluster.address or os.environ.get("RAY_ADDRESS"):
        return None
    return local_device_count(config.cluster.cpu_slots)


def episode_fault(config: Config, horizon: int, source: str) -> Fault | None:
    """GRPO compares whole episodes, so a rollout must hold one; `source` names where `horizon` comes from."""
    if config.algorithm.name != "grpo" or config.rollout.steps >= horizon:
        return None
    enough = math.ceil(horizon / config.policy.chunk) * config.policy.chunk
    problem = f"shorter than one episode ({source} {horizon}), and GRPO compares whole episodes"
    return Fault("rollout.steps", config.rollout.steps, problem, f"nearest valid: {enough}")


def _env_counts(config: Config) -> Iterator[Finding]:
    """An env worker holds its share of the envs, cut into pipeline stages; each part has whole groups and blocks."""
    envs, stages, ranks = config.env.num_envs, max(config.pipeline_choices), _ranks(config, "env")
    group, block = config.algorithm.group_size, config.inference_block
    grpo = config.algorithm.name == "grpo"
    parts = stages * ranks
    unit = parts * math.lcm(group if grpo else 1, block if config.deterministic else 1)
    near_envs = nearest_multiples(envs, unit)
    cut = ("env.num_envs", "rollout.pipeline_stages")
    if envs % parts:
        near = nearest_divisors(stages, envs // ranks) if envs % ranks == 0 else ""
        what = f"rollout.pipeline_stages ({stages})" + (f" x {ranks} env workers" if ranks > 1 else "")
        hint = f"nearest valid: {near_envs}" + (f"; or rollout.pipeline_stages {near}" if near else "")
        keys: tuple[str, ...] = (*cut, "placement") if ranks > 1 else cut
        yield keys, Fault("env.num_envs", envs, f"not divisible by {what}", hint)
    share = envs // parts if envs % parts == 0 else envs
    of = f"the {share} envs of a pipeline stage" if share < envs else f"env.num_envs ({envs})"
    keys = (*cut, "algorithm.name", "algorithm.group_size")
    if grpo and group < 2:
        fault = Fault("algorithm.group_size", group, "GRPO compares at least 2 episodes", "nearest valid: 2")
        yield keys, fault
    elif grpo and share % group:
        near = nearest_divisors(group, share, minimum=2)
        hint = (f"nearest valid: {near}; or " if near else "") + f"env.num_envs {near_envs}"
        yield keys, Fault("algorithm.group_size", group, f"does not divide {of}: a group is never cut", hint)
    if config.deterministic and envs % parts == 0 and share % block:
        hint = f"nearest valid: {nearest_divisors(block, share)}; or env.num_envs {near_envs}"
        yield (*cut, "deterministic", "inference_block"), Fault("inference_block", block, f"does not divide {of}", hint)
    mixed = len(env_parts(config.env))
    if mixed > 1 and mixed * (group if grpo else 1) > share:
        problem = f"{mixed} envs or servers to share among, and {of}" + (f", in groups of {group}" if grpo else "")
        fault = Fault("env.mix" if config.env.mix else "env.server", None, problem, "a greater env.num_envs")
        yield (*cut, "env.mix", "env.server", "algorithm.name", "algorithm.group_size"), fault
    processes = config.env.processes
    if processes is not None and processes > envs / parts:
        hint = f"nearest valid: {max(1, envs // parts)}"
        yield (*cut, "env.processes"), Fault("env.processes", processes, f"more than {of}", hint)


def _ranks(config: Config, group: str) -> int:
    """The number of a group's workers; 1 if the placement is at fault or the devices are not known."""
    devices = visible_devices(config)
    try:
        return (
            len(parse_placement(config.initial_placement, devices[0], GROUPS, devices[1])[group].ranks)
            if devices
            else 1
        )
    except ValueError:
        return 1


def _actor_shares(config: Config) -> Iterator[Finding]:
    """An actor worker learns from whole pipeline stages; the others would wait for one that has none."""
    actors, ranks, stages = _ranks(config, "actor"), _ranks(config, "env"), min(config.pipeline_choices)
    if config.sft.data is None and actors > ranks * stages:
        of = f"{stages} pipeline stage(s) of {ranks} env worker(s)"
        problem = f"gives {actors} actor workers, which share the {of}, and each needs one"
        hint = f"fewer actor workers; or rollout.pipeline_stages {math.ceil(actors / ranks)}"
        yield ("placement", "rollout.pipeline_stages"), Fault("placement", config.placement, problem, hint)


def _pipeline(config: Config) -> Iterator[Finding]:
    if config.rollout.pipeline_stages == "auto" and not config.deterministic:
        problem = "would let timings decide how batches are cut, and with them the last digits of every result"
        fault = Fault("rollout.pipeline_stages", "auto", problem, "nearest valid: 2; or deterministic true")
        yield ("rollout.pipeline_stages", "deterministic"), fault


def _steps(config: Config) -> Iterator[Finding]:
    steps, chunk, horizon = config.rollout.steps, config.policy.chunk, config.env.horizon
    keys: tuple[str, ...] = ("rollout.steps", "policy.chunk")
    if steps % chunk:
        near_chunks = nearest_divisors(chunk, steps)
        hint = f"nearest valid: {nearest_multiples(steps, chunk)}; or policy.chunk {near_chunks}"
        yield keys, Fault("rollout.steps", steps, f"not divisible by policy.chunk ({chunk})", hint)
    if horizon is None:
        return
    keys = (*keys, "env.horizon")
    if horizon % chunk:
        near = nearest_divisors(chunk, *([horizon] if steps % chunk else [horizon, steps]))
        hint = f"nearest valid: {near}; or env.horizon {nearest_multiples(horizon, chunk)}"
        yield keys, Fault("policy.chunk", chunk, f"does not divide env.horizon ({horizon})", hint)
    elif fault := episode_fault(config, horizon, "env.horizon"):
        yield (*keys, "algorithm.name"), fault


def _batches(config: Config) -> Iterator[Finding]:
    batch, minibatches = config.chunk_steps * config.env.num_envs, config.algorithm.minibatches
    if minibatches > batch:
        keys = ("algorithm.minibatches", "env.num_envs", "rollout.steps", "policy.chunk")
        problem = f"more than the {batch} chunk steps of an iteration"
        yield keys, Fault("algorithm.minibatches", minibatches, problem, f"nearest valid: {batch}")
    if config.train.stop_at_success is not None and config.evaluation.every == 0:
        problem = "needs evaluations during training, and evaluation.every is 0"
        fault = Fault("train.stop_at_success", config.train.stop_at_success, problem, "set evaluation.every >= 1")
        yield ("train.stop_at_success", "evaluation.every"), fault


def _critic_and_filter(config: Config) -> Iterator[Finding]:
    """What only PPO, or only GRPO with a filter, can have."""
    algorithm, iterations = config.algorithm, config.train.iterations
    if algorithm.name == "grpo" and algorithm.critic_warmup:
        fault = Fault("algorithm.critic_warmup", algorithm.critic_warmup, "GRPO has no critic", "nearest valid: 0")
        yield ("algorithm.name", "algorithm.critic_warmup"), fault
    elif algorithm.critic_warmup >= iterations:
        problem = f"leaves none of the {iterations} iterations to learn in"
        fault = Fault("algorithm.critic_warmup", algorithm.critic_warmup, problem, f"below {iterations}")
        yield ("train.iterations", "algorithm.critic_warmup"), fault
    for name in ("filter_low", "filter_high"):
        if algorithm.name == "ppo" and (bound := getattr(algorithm, name)) is not None:
            fault = Fault(f"algorithm.{name}", bound, "PPO compares no groups that could be dropped", "leave it out")
            yield ("algorithm.name", f"algorithm.{name}"), fault
    if algorithm.filter_rollouts > 1 and not algorithm.filters_groups:
        problem = "rollouts are repeated to replace the groups that GRPO drops, and none is dropped"
        hint = "nearest valid: 1; or algorithm.filter_low and filter_high"
        keys = ("algorithm.name", "algorithm.filter_rollouts", "algorithm.filter_low", "algorithm.filter_high")
        yield keys, Fault("algorithm.filter_rollouts", algorithm.filter_rollouts, problem, hint)


def _evaluation(config: Config) -> Iterator[Finding]:
    evaluation = config.evaluation
    keys = ("evaluation.temperature", "evaluation.deterministic", "policy.kind")
    if evaluation.temperature is None:
        return
    if config.policy.vla is None:
        problem = f"the {config.policy.kind} policy has no temperature"
        yield keys, Fault("evaluation.temperature", evaluation.temperature, problem, "leave it out")
    elif evaluation.deterministic:
        problem = "nothing is sampled in deterministic evaluations"
        yield keys, Fault("evaluation.temperature", evaluation.temperature, problem, "evaluation.deterministic=false")


def _algorithm(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    low, high = algorithm.filter_low, algorithm.filter_high
    if low is not None and high is not None and low >= high:
        problem = f"not below algorithm.filter_high ({high:g}), so every group would be dropped"
        fault = Fault("algorithm.filter_low", low, problem, f"a value below {high:g}")
        yield ("algorithm.filter_low", "algorithm.filter_high"), fault
    if algorithm.clip_high < algorithm.clip_low:
        problem = f"below algorithm.clip_low ({algorithm.clip_low:g})"
        fault = Fault("algorithm.clip_high", algorithm.clip_high, problem, f"nearest valid: {algorithm.clip_low:g}")
        yield ("algorithm.clip_low", "algorithm.clip_high"), fault
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1 + algorithm.clip_high:
        problem = f"not above 1 + algorithm.clip_high ({1 + algorithm.clip_high:g})"
        fault = Fault("algorithm.dual_clip", algorithm.dual_clip, problem, "the paper's value is 3")
        yield ("algorithm.dual_clip", "algorithm.clip_high"), fault


def _observation(config: Config) -> Iterator[Finding]:
    kind, seen = config.policy.kind, list(config.env.observation)
    keys: tuple[str, ...] = ("env.observation", "policy.kind")
    needed = {"state": "the state"} if kind == "mlp" else {"image": "images"}
    if kind == "openvla_oft" and config.policy.openvla_oft.proprioception:
        keys, needed = (*keys, "policy.openvla_oft.proprioception"), {"state": "the state", **needed}
    if not set(needed) <= set(seen):
        problem = f"the {kind} policy sees {' and '.join(needed.values())}"
        yield keys, Fault("env.observation", seen, problem, f"nearest valid: [{', '.join(needed)}]")


def _critic_of_state(config: Config) -> Iterator[Finding]:
    options, kind = config.policy.vla, config.policy.kind
    if options is not None and options.value_of_state and "state" not in config.env.observation:
        fault = Fault(f"policy.{kind}.value_of_state", True, "no state is observed", "env.observation=[state, image]")
        yield ("env.observation", "policy.kind", f"policy.{kind}.value_of_state"), fault


def _policy(config: Config) -> Iterator[Finding]:
    """What each kind can do; and no kind has another's options."""
    policy, default = config.policy, PolicyConfig()
    if policy.kind == "openvla" and policy.chunk != 1:
        hint = "nearest valid: 1; or policy.kind openvla_oft"
        fault = Fault("policy.chunk", policy.chunk, "OpenVLA decides on one action at a time", hint)
        yield ("policy.chunk", "policy.kind"), fault
    if policy.kind == "openvla_oft":
        yield from _oft(config)
    foreign = []
    if policy.vla is not None:
        problem = f"the {policy.kind} policy does not have it"
        foreign = [(f"policy.{name}", getattr(policy, name), getattr(default, name), problem) for name in MLP_KEYS]
    for kind, title in VLA_TITLES.items():
        if policy.kind != kind:
            problem = f"only {title} has it, and policy.kind is {policy.kind}"
            given, defaults = getattr(policy, kind), getattr(default, kind)
            foreign += [(f"policy.{kind}.{name}", value, getattr(defaults, name), problem) for name, value in given]
    for key, value, expected, problem in foreign:
        if value != expected:
            yield ("policy.kind", key), Fault(key, value, problem, f"nearest valid: {show(expected)}")


def _oft(config: Config) -> Iterator[Finding]:
    options, level = config.policy.openvla_oft, config.algorithm.ratio_level
    if options.head != "tokens":
        keys = ("policy.kind", "policy.openvla_oft.head")
        yield keys, Fault(keys[1], options.head, "regressed actions can be evaluated only", "nearest valid: tokens")
    if options.value_of == "action" and level == "chunk":
        problem = "one ratio for the whole chunk, and policy.openvla_oft.value_of gives each action an advantage"
        fault = Fault("algorithm.ratio_level", level, problem, "nearest valid: action or token")
        yield ("policy.kind", "policy.openvla_oft.value_of", "algorithm.ratio_level"), fault


def _simulator_keys(config: Config) -> Iterator[Finding]:
    env = config.env
    known = {key for part in env_parts(env) for key in SIMULATOR_KEYS.get(part.env.kind, ())}
    for name in dict.fromkeys(key for keys in SIMULATOR_KEYS.values() for key in keys):
        value, default = getattr(env, name), getattr(EnvConfig(), name)
        if value != default and name not in known:
            owners = any_of([title for kind, title in SIMULATOR_TITLES.items() if name in SIMULATOR_KEYS[kind]])
            problem = f"only {owners} has it, and env.kind is {env.kind}"
            yield ("env.kind", f"env.{name}"), Fault(f"env.{name}", value, problem, f"nearest valid: {show(default)}")
    if env.held_out_init_states and env.init_states != "stored":
        problem = "only stored initial states can be held out; sampled ones are new in every evaluation"
        keys = ("env.held_out_init_states", "env.init_states")
        yield keys, Fault(keys[0], env.held_out_init_states, problem, "nearest valid: 0; or env.init_states stored")
    if env.kind == "maniskill" and env.sim_freq and env.control_freq and env.sim_freq % env.control_freq:
        problem = f"does not divide env.sim_freq ({env.sim_freq})"
        hint = f"nearest valid: {nearest_divisors(env.control_freq, env.sim_freq)}"
        yield ("env.sim_freq", "env.control_freq"), Fault("env.control_freq", env.control_freq, problem, hint)


def _placement(config: Config) -> Iterator[Finding]:
    # A cluster's devices are counted when it is joined; here any number may exist.
    count, kind = visible_devices(config) or (2**12, "gpu")
    try:
        parse_placement(config.initial_placement, count, GROUPS, kind)
    except ValueError as error:
        fault = Fault("placement", config.placement, str(error), "for example: actor, rollout, env: all")
        yield ("placement", "cluster.cpu_slots", "cluster.address"), fault
