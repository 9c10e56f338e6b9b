"""OpenVLA against a plain loop over transformers and timm with the same weights: time of an action and of an update.

    python benchmarks/openvla.py                      # the tiny preset, a batch of 16, one thread
    python benchmarks/openvla.py --checkpoint DIR --device cuda --dtype bfloat16
    python benchmarks/openvla.py --memory             # what the published 7B model would need, estimated
    python benchmarks/openvla.py --compile inductor   # OpenVLA-OFT instead: its language model compiled, and not
    python benchmarks/openvla.py --compile inductor cudagraphs --device cuda --checkpoint DIR --dtype bfloat16

The loop reads image, prompt and the tokens so far in one full forward pass for each token, without a cache. Both sides
run in turn, and the medians are compared.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from policies import PolicyOutput, SlotNoise, openvla, openvla_oft
from policies.lora import LoRASettings
from policies.openvla import ActionTokenPolicy, OpenVLAPolicy, OpenVLASettings
from policies.openvla.config import OpenVLAConfig
from policies.openvla.memory import estimate_memory

WORDS = ("pick up the cube", "open the top drawer of the cabinet", "push", "place the black bowl in the basket now")


class PlainLoop:
    """What one writes first: transformers' Llama, timm's `get_intermediate_layers`, full logits."""

    def __init__(self, policy: OpenVLAPolicy) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.policy, self.network = policy, policy.network
        text = policy.config.text
        config = LlamaConfig(
            **{key: value for key, value in vars(text).items() if key not in ("rope_theta", "head_dim")},
            rope_parameters={"rope_type": "default", "rope_theta": text.rope_theta},
        )
        weight = policy.network.language_model.lm_head.weight
        self.llama = LlamaForCausalLM(config).to(weight.device, weight.dtype)
        self.llama.load_state_dict(policy.network.language_model.state_dict())

    def logits(self, ids: Tensor, pixels: Tensor) -> Tensor:
        """Logits [N, L, vocabulary] of prompts and tokens so far."""
        mask = ids != self.policy.config.pad_token_id
        towers = zip(self.network.vision_backbone.towers, pixels.split(3, dim=1), strict=True)
        features = [tower.get_intermediate_layers(x, n=[len(tower.blocks) - 2])[0] for tower, x in towers]
        patches = self.network.projector(torch.cat(features, dim=-1))
        words = self.llama.model.embed_tokens(ids)
        embeddings = torch.cat([words[:, :1], patches, words[:, 1:]], dim=1)
        mask = torch.cat([mask[:, :1], mask.new_ones(patches.shape[:2]), mask[:, 1:]], dim=1)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        output = self.llama(
            inputs_embeds=embeddings, attention_mask=mask.long(), position_ids=positions, use_cache=False
        )
        return output.logits[:, patches.shape[1] :].float()

    @torch.no_grad()
    def act(self, observation: dict[str, Any]) -> Tensor:
        """Greedy tokens [N, A]."""
        ids, pixels = self._inputs(observation)
        length = ids.shape[1]
        for _ in range(len(self.policy.statistics.low)):
            logits = self.logits(ids, pixels)[:, -1, self.policy.tokens.ids]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True) + self.policy.tokens.ids.start], dim=1)
        return ids[:, length:]

    def logprob(self, observation: dict[str, Any], tokens: Tensor) -> Tensor:
        """Log-probs [N, A] of tokens among action ids."""
        ids, pixels = self._inputs(observation)
        logits = self.logits(torch.cat([ids, tokens], dim=1), pixels)[:, ids.shape[1] - 1 : -1]
        log_p = logits[..., self.policy.tokens.ids].log_softmax(-1)
        return log_p.gather(-1, tokens[..., None] - self.policy.tokens.ids.start)[..., 0]

    def _inputs(self, observation: dict[str, Any]) -> tuple[Tensor, Tensor]:
        prepared = self.policy.prepare(observation)
        weight = self.llama.lm_head.weight
        pixels = self.policy.processor.normalise(prepared["pixels"]).to(weight.device, weight.dtype)
        return prepared["prompt"].to(weight.device), pixels


def update(logprob: Tensor, parameters: list[torch.nn.Parameter]) -> None:
    """A backward pass, and the gradients dropped again."""
    (-logprob.mean()).backward()
    for parameter in parameters:
        parameter.grad = None


def seconds(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median time of each, taken in turn after one run that does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def observation(policy: ActionTokenPolicy, arguments: argparse.Namespace) -> dict[str, Any]:
    """Random pictures, and prompts of unequal length."""
    size, count = policy.config.image_size, arguments.batch
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(256, (count, 1, size, size, 3), dtype=torch.uint8, generator=generator)
    return {"image": image.to(arguments.device), "instruction": [WORDS[i % len(WORDS)] for i in range(count)]}


def print_memory() -> None:
    """The published model in bfloat16, batches of 64 envs, micro-batches of 8 samples."""
    config = OpenVLAConfig.from_dict({"model_type": "openvla", "torch_dtype": "bfloat16"})
    variants = {
        "all": OpenVLASettings(),
        "all, checkpointing": OpenVLASettings(gradient_checkpointing=True),
        "LoRA 32": OpenVLASettings(lora=LoRASettings()),
        "LoRA 32, checkpointing": OpenVLASettings(lora=LoRASettings(), gradient_checkpointing=True),
    }
    for name, settings in variants.items():
        estimate = estimate_memory(config, settings, batch=64, micro_batch=8)
        names = ("parameters", "gradients", "optimiser", "activations", "learning", "keys_values", "inference")
        print(f"{name:24}" + "  ".join(f"{part} {getattr(estimate, part) / 1e9:.1f} GB" for part in names))


def compare_compiled(arguments: argparse.Namespace) -> None:
    """Acting by OpenVLA-OFT, whose shapes are static here, with and without `torch.compile`."""
    checkpoint = "openvla-oft-tiny" if arguments.checkpoint == "openvla-tiny" else arguments.checkpoint
    options = {"unnorm_key": arguments.unnorm_key, "dtype": arguments.dtype, "prompt_length": 48}
    runs: dict[str, Callable[[], PolicyOutput]] = {}
    outputs: dict[str, PolicyOutput] = {}
    for backend in (None, *arguments.compile):
        torch.manual_seed(0)
        policy = openvla_oft.load(checkpoint, **options, compile=backend).to(arguments.device).eval()
        seen = policy.prepare(observation(policy, arguments))
        runs[backend or "eager"] = functools.partial(policy.act, seen, True, None)
    print(f"{checkpoint}, batch {arguments.batch}, {arguments.device}, {arguments.dtype}, one CPU thread")
    for name, run in runs.items():
        start = time.perf_counter()
        outputs[name] = run()
        gap = (outputs[name].logprob - outputs["eager"].logprob).abs().max()
        same = (outputs[name].token == outputs["eager"].token).float().mean()
        first = time.perf_counter() - start
        print(f"{name:12} first call {first:7.2f} s; {same:.1%} of greedy tokens as eager, log-probs {gap:.1e} apart")
    times = seconds(runs, arguments.repeats)
    for name, value in times.items():
        ratio = times["eager"] / value
        print(f"{name:12} {1000 * value / arguments.batch:8.3f} ms a chunk   {ratio:5.2f} x the eager speed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="openvla-tiny", help="directory, or name of a preset")
    parser.add_argument("--unnorm-key", default=None)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--compile", nargs="+", metavar="BACKEND", help="of torch.compile, to compare on OpenVLA-OFT")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print_memory()
        return
    if arguments.compile:
        compare_compiled(arguments)
        return

    policy = openvla.load(arguments.checkpoint, unnorm_key=arguments.unnorm_key, dtype=arguments.dtype)
    policy = policy.to(arguments.device).eval()
    plain, count = PlainLoop(policy), arguments.batch
    seen = policy.prepare(observation(policy, arguments))

    output = policy.act(seen, True, None)
    tokens = output.token[:, 0]
    same = (plain.act(seen) == tokens).float().mean()
    gap = (plain.logprob(seen, tokens) - output.logprob[:, 0]).abs().max()
    print(f"{arguments.checkpoint}, batch {count}, {arguments.device}, {arguments.dtype}, one CPU thread")
    print(f"same greedy tokens: {same:.1%}; largest difference of log-probs: {gap:.1e}")

    parameters = [*policy.parameters(), *plain.llama.parameters()]
    acting = seconds(
        {
            "plain": lambda: plain.act(seen),
            "ours": lambda: policy.act(seen, True, None),
            "sampled": lambda: policy.act(seen, False, SlotNoise(0, range(count))),
        },
        arguments.repeats,
    )
    learning = seconds(
        {
            "plain": lambda: update(plain.logprob(seen, tokens), parameters),
            "ours": lambda: update(policy.evaluate(seen, output.token)[0], parameters),
        },
        arguments.repeats,
    )
    for title, times in (("an action", acting), ("forward and backward of a sample", learning)):
        for name, value in times.items():
            ratio = times["plain"] / value
            print(f"{title:34} {name:8} {1000 * value / count:8.3f} ms   {ratio:5.2f} x the plain loop's speed")


if __name__ == "__main__":
    main()
