"""The macro flows of reasoning: who works on whose output. Where and when is planned; see `scheduler.plan`.

training      sampler.generate -> judge.score -> (actor.refer) -> (actor.accumulate) -> actor.update
              -> sampler.load_weights
evaluation    sampler.generate -> judge.score
weights       `embodied_rl.flows.weights_flow`, where there is no update before

An item is a prompt, then the group of its completions. Groups are judged, and with `algorithm.elastic` learned from,
while others are still being sampled. With `sampling.ahead` the actor learns from the groups of the iteration before.
Arguments `sampler`, `judge` and `actor` are worker groups, or `PlannedGroup`s to plan without workers.
"""

from __future__ import annotations

from typing import Any

from reasoning.config import MathConfig
from scheduler.flow import Flow

ELASTIC_CALLS = 8  # at least, of `actor.accumulate` in an iteration: single groups would make small batches


def training_flow(config: MathConfig, sampler: Any, judge: Any, actor: Any) -> Flow:
    """One iteration; the sampler takes its prompts at once and fills its batch with them by itself."""
    flow = Flow(config.algorithm.name)
    samples = flow.stage(sampler.generate, flow.source("prompts"), granularity=config.sampling.prompts)
    scored = flow.stage(judge.score, samples)
    if config.sampling.ahead:
        scored = flow.source("groups")
    if config.algorithm.kl_coef:
        scored = flow.stage(actor.refer, scored)
    if config.algorithm.elastic:
        prompts = config.sampling.prompts
        size = next(size for size in range(max(1, prompts // ELASTIC_CALLS), 0, -1) if prompts % size == 0)
        scored = flow.stage(actor.accumulate, scored, granularity=size)
    weights = flow.stage(actor.update, scored, gather=True)
    flow.stage(sampler.load_weights, weights, gather=True, broadcast=True)
    return flow


def evaluation_flow(problems: int, sampler: Any, judge: Any) -> Flow:
    """Completions of the present model, judged."""
    flow = Flow("evaluation")
    samples = flow.stage(sampler.generate, flow.source("prompts"), granularity=problems)
    flow.stage(judge.score, samples)
    return flow
