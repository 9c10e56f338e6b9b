"""What `--dry-run` prints of a reasoning run: configuration, memory, and plans on GPUs. Nothing is started.

Sizes come from the shape of the model; seconds from them too, by the rates of an ASSUMED device.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from embodied_rl.faults import Fault, show
from reasoning.config import MathConfig
from reasoning.flows import training_flow
from reasoning.recipe import GROUPS
from scheduler.device_space import DeviceSet, PlanError
from scheduler.flow import PlannedGroup
from scheduler.plan import make_plan
from scheduler.profile import Profile, Sample

GB, GIB = 1e9, 2**30
ASSUMED = DeviceSet("H100", 1, 80 * GIB)
RATE, BANDWIDTH, LINK = 400e12, 3e12, 20e9  # operations, bytes of its memory, bytes to another device in a second
JUDGE_S = 0.005  # an answer
CLUSTERS = (8, 16, 32, 64)


@dataclass(frozen=True)
class Shape:
    """What of a model decides its size; `experts` in each layer, of which a token passes `active`."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool
    experts: int = 1
    active: int = 1

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """From a `config.json`."""
        heads = config["num_attention_heads"]
        experts = config.get("num_experts") or config.get("num_local_experts") or 1
        return cls(
            config["hidden_size"],
            config.get("moe_intermediate_size") or config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
            bool(config.get("tie_word_embeddings")),
            experts,
            config.get("num_experts_per_tok", 1) if experts > 1 else 1,
        )

    def parameters(self, experts: int) -> int:
        """Of a network with so many experts in a layer; without biases and norms."""
        attention = 2 * self.hidden * self.head * (self.heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        layer = attention + router + experts * 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def adapters(self, rank: int) -> int:
        """Parameters of adapters on the attention, and on the feed-forward layers where there are no experts."""
        widths = 2 * (self.hidden + self.heads * self.head) + 2 * (self.hidden + self.kv_heads * self.head)
        widths += 3 * (self.hidden + self.intermediate) if self.experts == 1 else 0
        return self.layers * rank * widths


PUBLISHED = {
    "tiny": Shape(128, 384, 4, 4, 4, 32, 50, False),
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 64, 49152, True),
    "Qwen2.5-0.5B": Shape(896, 4864, 24, 14, 2, 64, 151936, True),
    "Qwen2.5-1.5B": Shape(1536, 8960, 28, 12, 2, 128, 151936, True),
    "Qwen2.5-3B": Shape(2048, 11008, 36, 16, 2, 128, 151936, True),
    "Qwen2.5-7B": Shape(3584, 18944, 28, 28, 4, 128, 152064, False),
    "Qwen3-30B-A3B": Shape(2048, 768, 48, 32, 4, 128, 151936, False, 128, 8),
    "OLMoE-1B-7B": Shape(2048, 1024, 16, 16, 16, 128, 50304, False, 64, 8),
}


def shape_of(path: str) -> tuple[Shape, str]:
    """What a model's `config.json` says, or what is published of a model that is not here; and which of these."""
    file = Path(path) / "config.json"
    if file.is_file():
        return Shape.of(json.loads(file.read_text())), str(file)
    for name, shape in PUBLISHED.items():
        if name.lower() in path.lower():
            return shape, f"the published shape of {name}"
    return PUBLISHED["tiny"], "the preset tiny, because the model's own shape is not known here"


def dry_run_text(config: MathConfig, run_dir: Path, needed: Sequence[Fault] = ()) -> str:
    """The resolved configuration, the memory of each worker on a device, plans on clusters, and what is `needed`."""
    content = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    shape, source = shape_of(config.model.path)
    parts = memory(config, shape)
    lines = [f"{content}\nwould write to {run_dir}", f"memory on a device, estimated from {source}:"]
    lines += [f"  {name:26} {size / GB:8.2f} GB = {formula}" for name, size, formula in parts]
    lines += [f"  {'in all':26} {sum(size for _, size, _ in parts) / GB:8.2f} GB"]
    lines += ["plans, from rates that are assumed of an H100 (a run measures, and plans with placement=auto):"]
    lines += [f"  {count:3} GPUs  {plan_line(config, shape, count)}" for count in CLUSTERS]
    lines += ["still needed, without it the run does not start:"] if needed else []
    lines += [
        f"  {fault.key} = {show(fault.value)}: {'; '.join(filter(None, (fault.problem, fault.hint)))}"
        for fault in needed
    ]
    return "\n".join(lines)


def memory(config: MathConfig, shape: Shape) -> list[tuple[str, float, str]]:
    """Bytes that each worker needs on its device, with the formula."""
    network, rank = shape.parameters(shape.experts), config.model.lora_rank
    low = 2 if config.model.dtype == "bfloat16" else 4
    learned = network if rank is None else shape.adapters(rank)
    stored = network * 4 if rank is None else network * low + learned * 4
    reference = network * 4 if config.algorithm.kl_coef and rank is None else 0
    tokens, hidden, layers = config.algorithm.token_budget, shape.hidden, shape.layers
    kept = layers * hidden * tokens * low * (1 if config.model.gradient_checkpointing else 16)
    logits = 3 * tokens * shape.vocabulary * 4
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    cache = 2 * layers * shape.kv_heads * shape.head * config.sampling.max_rows * longest * low
    widths = f"{tokens} tokens x ({layers} layers x {hidden} + 3 x {shape.vocabulary} x 4)"
    return [
        ("actor, parameters", stored + reference, "4 bytes each where trained, with the reference if there is one"),
        ("actor, gradients and Adam", learned * 12, f"{learned:,} learned parameters x 12 bytes"),
        ("actor, activations", kept + logits, widths),
        ("sampler, parameters", network * low, f"{network:,} parameters x {low} bytes"),
        ("sampler, keys and values", cache, f"{config.sampling.max_rows} rows at their longest"),
    ]


def plan_line(config: MathConfig, shape: Shape, count: int) -> str:
    """Where the groups would be on so many GPUs, the predicted time and the memory; or why there is no plan."""
    if count > config.sampling.prompts:
        return f"more than sampling.prompts ({config.sampling.prompts}): some ranks would have nothing to do"
    flow = training_flow(config, *(PlannedGroup(name) for name in GROUPS))
    devices = (DeviceSet(ASSUMED.kind, count, ASSUMED.memory),)
    try:
        plan = make_plan(flow, assumed_profile(config, shape), devices, config.sampling.prompts)
    except PlanError as error:
        return str(error).splitlines()[-1].strip()
    most = max(plan.memory_bytes.values())
    return f"{plan.placement_text}: {plan.predicted_s:.3g} s an iteration, up to {most / GB:.0f} GB on a GPU"


def assumed_profile(config: MathConfig, shape: Shape) -> Profile:
    """Costs of the stages on one ASSUMED device, with prompts and completions at their longest."""
    sampling, sizes = config.sampling, {name: size for name, size, _ in memory(config, shape)}
    held = {group: int(sum(size for name, size in sizes.items() if name.startswith(group))) for group in GROUPS}
    active = shape.parameters(shape.active)
    prompt, answer = config.data.max_prompt_tokens, sampling.max_new_tokens
    passes = 3 if config.model.lora_rank is None else 2  # forward; backward to activations, and to parameters
    passes = passes + 1 if config.model.gradient_checkpointing else passes
    learned = sizes["actor, gradients and Adam"] / 12 * 4
    profile = Profile("assumed", config.algorithm.name)
    for items in (1, max(2, sampling.prompts // 8), max(3, sampling.prompts)):
        rows = items * sampling.group_size
        tokens = items * prompt + rows * answer
        at_once = min(rows, sampling.max_rows)
        step_s = max(sizes["sampler, parameters"] / BANDWIDTH, 2 * active * at_once / RATE)
        step_s += sizes["sampler, keys and values"] / sampling.max_rows * at_once / BANDWIDTH
        forward_s = 2 * active * tokens / RATE
        seconds = {
            "sampler.generate": 2 * active * items * prompt / RATE + -(-rows // at_once) * answer * step_s,
            "judge.score": rows * JUDGE_S,
            "actor.refer": forward_s,
            "actor.accumulate": passes * forward_s,
            "actor.update": passes * forward_s,
            "sampler.load_weights": learned / LINK,
        }
        for stage, found in seconds.items():
            profile.add(Sample(stage, items, 1, found, held[stage.partition(".")[0]]))
    for group in GROUPS:
        profile.add_group(group, held[group], held[group] / LINK, held[group] / LINK)
    return profile
