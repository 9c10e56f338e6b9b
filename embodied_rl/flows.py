"""The embodied macro flows: who works on whose output. Where and when is planned; see `scheduler.plan`.

training      (env.rollout <> rollout.generate) -> actor.update -> rollout.load_weights
evaluation    (env.evaluate <> rollout.serve)
fine-tuning   actor.imitate -> rollout.load_weights
weights       actor.weights -> rollout.load_weights, where there is no update before

Arguments `env`, `rollout` and `actor` are worker groups, or `PlannedGroup`s to plan without workers.
"""

from __future__ import annotations

import math
from typing import Any

from embodied_rl.config import Config
from scheduler.flow import Flow


def training_flow(config: Config, env: Any, rollout: Any, actor: Any) -> Flow:
    """One iteration of PPO or GRPO. An item is an env with its rollout; GRPO never cuts a group of them."""
    flow = Flow(config.algorithm.name)
    group = config.algorithm.group_size if config.algorithm.name == "grpo" else 1
    block = config.inference_block if config.deterministic else 1
    trajectories = flow.loop(
        env.rollout,
        rollout.generate,
        steps=config.chunk_steps,
        items=config.env.num_envs,
        gather=True,
        granularity=math.lcm(group, block),
        pipeline=config.pipeline_choices,
    )
    weights = flow.stage(actor.update, trajectories, gather=True)
    flow.stage(rollout.load_weights, weights, gather=True, broadcast=True)
    return flow


def evaluation_flow(config: Config, env: Any, rollout: Any) -> Flow:
    """Episodes of the present policy; each is run once, by whichever env is free."""
    flow = Flow("evaluation")
    flow.loop(env.evaluate, rollout.serve, steps=1, items=config.env.num_envs, pipeline=config.pipeline_choices)
    return flow


def fine_tuning_flow(rollout: Any, actor: Any) -> Flow:
    """One iteration of supervised fine-tuning. An item is what one actor rank takes of the demonstrations."""
    flow = Flow("sft")
    weights = flow.stage(actor.imitate, flow.source("demonstrations"), gather=True)
    flow.stage(rollout.load_weights, weights, gather=True, broadcast=True)
    return flow


def weights_flow(rollout: Any, actor: Any) -> Flow:
    """The actor's parameters to the rollout workers."""
    flow = Flow("weights")
    weights = flow.stage(actor.weights, flow.source("request"), gather=True)
    flow.stage(rollout.load_weights, weights, gather=True, broadcast=True)
    return flow
