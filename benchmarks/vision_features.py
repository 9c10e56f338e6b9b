"""An iteration's update from pictures, and from the features that frozen vision towers made of them while acting.

    python benchmarks/vision_features.py                                    # maniskill_openvla_tiny_ppo
    python benchmarks/vision_features.py --recipe libero_object_openvla_oft_tiny_grpo
    python benchmarks/vision_features.py algorithm.epochs=2                 # any key

The recipe's own actor learns from random pictures, one thread, no simulator. Prints CPU seconds of an update, medians
of updates in turn, and what one picture takes where it is recorded; and how far parameters of both ways are apart after
the first update, and have moved.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from embodied_rl.build import build_policy
from embodied_rl.config import Config
from embodied_rl.data import Trajectories
from embodied_rl.recipe import load_recipe
from embodied_rl.workers.actor import ActorWorker
from envs.base import ActionSpec, EnvSpec
from policies import SlotNoise
from scheduler.trace import Trace

STATE_SIZE, ACTION_SIZE = 8, 3
VARIANTS = {
    "all trained": ["frozen=[]", "reuse_features=false"],
    "towers frozen, from pictures": ["frozen=[vision_backbone]", "reuse_features=false"],
    "towers frozen, from features": ["frozen=[vision_backbone]", "reuse_features=true"],
}


class Alone:
    """The place of a worker that has no peers."""

    rank, world_size, device_kind, group, name = 0, 1, "cpu", "actor", "actor[0]"


def make_actor(config: Config, spec: EnvSpec) -> ActorWorker:
    """An actor in this process."""
    actor = ActorWorker.__new__(ActorWorker)
    actor.context, actor.trace = Alone(), Trace("actor[0]")  # type: ignore[assignment]
    actor.__init__(config)  # type: ignore[misc]
    actor.build(spec)
    actor.iteration = config.train.iterations - 1  # beyond all warm-ups
    return actor


def rollouts(config: Config, spec: EnvSpec) -> list[Trajectories]:
    """What rollout workers record of random pictures in one iteration; half of the episodes succeed."""
    policy, generator = build_policy(config, spec).eval(), torch.Generator().manual_seed(0)
    steps, envs, found = config.chunk_steps, config.env.num_envs, []
    assert spec.image_shape is not None
    for _ in range(config.rollout.epochs):
        outputs, seen = [], []
        for step in range(steps):
            image = torch.randint(256, (envs, *spec.image_shape), dtype=torch.uint8, generator=generator)
            state = torch.rand(envs, STATE_SIZE, generator=generator)
            prepared = policy.prepare({"image": image, "state": state, "instruction": [spec.instruction] * envs})
            seen.append(policy.encode(prepared))
            outputs.append(policy.act(seen[-1], False, SlotNoise(step, range(envs))))
        stack = lambda name: torch.stack([getattr(output, name) for output in outputs])  # noqa: E731, B023
        never = torch.zeros(steps, envs, config.policy.chunk, dtype=torch.bool)
        success = never[..., 0].clone()
        success[-1, ::2] = True
        found.append(
            Trajectories(
                observation={key: torch.stack([one[key] for one in seen]) for key in seen[0]},
                token=stack("token"),
                logprob=stack("logprob"),
                value=stack("value"),
                next_value=torch.zeros(steps, envs),
                reward=torch.rand(never.shape, generator=generator),
                terminated=never,
                truncated=never,
                valid=~never,
                success=success,
                lost=never[..., 0],
                env_ids=torch.arange(envs),
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="maniskill_openvla_tiny_ppo")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    actors: dict[str, ActorWorker] = {}
    data: dict[str, list[Trajectories]] = {}
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for name, options in VARIANTS.items():
        config = configured(arguments.recipe, options, arguments.overrides)
        size, cameras = config.env.image_size, config.env.cameras
        action = ActionSpec((-1.0,) * ACTION_SIZE, (1.0,) * ACTION_SIZE)
        spec = EnvSpec(action, STATE_SIZE, (cameras, size, size, 3), config.env.horizon or 1, "push the cube", True)
        actors[name], data[name] = make_actor(config, spec), rollouts(config, spec)
    parameters: dict[str, dict[str, Tensor]] = {}
    for repeat in range(arguments.repeats + 1):
        for name, actor in actors.items():
            start = time.process_time()
            for rollout in data[name]:
                actor.update([rollout])
            if repeat:
                times[name].append(time.process_time() - start)
            else:
                parameters[name] = {key: value.clone() for key, value in actor.policy.learned_state().items()}
    begun = {name: p.detach() for name, p in build_policy(config, spec).named_parameters() if p.requires_grad}
    _, pictures, features = parameters.values()
    decisions = config.rollout.epochs * config.chunk_steps * config.env.num_envs
    print(f"{arguments.recipe}: {decisions} decisions an iteration, {config.algorithm.epochs} epochs")
    base = statistics.median(times["towers frozen, from pictures"])
    for name, values in times.items():
        observation = data[name][0].observation
        bytes_each = (observation["features"] if "features" in observation else observation["pixels"])[0, 0].nbytes
        median = statistics.median(values)
        print(f"{name:30} {median:8.3f} s of CPU an update   {median / base:5.2f}   {bytes_each:8} bytes a picture")
    apart, moved = (distance(begun, first, features) for first in (pictures, begun))
    print(f"after one update parameters of the last two are {apart:.1e} apart at most, and have moved by {moved:.1e}")


def distance(names: Iterable[str], first: dict[str, Any], second: dict[str, Any]) -> float:
    """The largest between parameters of these names."""
    return max(float((first[name] - second[name]).abs().max()) for name in names)


def configured(recipe: str, options: list[str], overrides: list[str]) -> Config:
    """The recipe with options of its policy."""
    kind = load_recipe(recipe, overrides)[0].policy.kind
    config, faults = load_recipe(recipe, [*overrides, *(f"policy.{kind}.{option}" for option in options)])
    if faults:
        sys.exit("\n".join(f"{fault.key}: {fault.problem}" for fault in faults))
    return config


if __name__ == "__main__":
    main()
