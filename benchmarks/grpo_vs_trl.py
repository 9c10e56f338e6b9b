"""GRPO by TRL's GRPOTrainer and by this project: samples per second, and the loss and gradients on one batch.

    pip install --target ../trl --no-deps trl datasets dill xxhash multiprocess pandas httpx
    PYTHONPATH=../trl python benchmarks/grpo_vs_trl.py

TRL is installed for this only. Both get the same Llama of 4.8 M parameters with random weights, the same prompts of 6
to 9 characters, 8 completions of each of 8 prompts in a step, 32 tokens in each (the token that would end one cannot be
drawn), the same reward, one update a step, and two threads. Steps of both take turns, so that they meet the same load.
Once without and once with a divergence from a reference model, whose log-probs are then computed too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer
from trl import __version__ as trl_version

from embodied_rl.sums import Sums
from reasoning.actor import LanguageActor
from reasoning.config import MathConfig, with_preset
from reasoning.data import Problem
from reasoning.models import LanguageModel
from reasoning.samples import Completion, Group, Prompt
from reasoning.team import MathTeam
from scheduler.cluster import Cluster

PROMPTS, GROUP, TOKENS, THREADS, LR = 8, 8, 32, 2, 1e-6
TEXTS = [f"{'ab' * (n % 4)}{n:02}+{7 * n % 100:02}=" for n in range(64)]


def digits(completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of digits."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def save_model(directory: Path) -> None:
    """A Llama whose vocabulary has 64 characters; the token that ends an answer lies beyond them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = "0123456789+-*/=()?. abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQ"
    vocabulary = {token: number for number, token in enumerate(["<pad>", *characters, "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(directory)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    network = LlamaForCausalLM(shape)
    print(f"{sum(p.numel() for p in network.parameters()):,} parameters, {THREADS} threads, TRL {trl_version}")
    network.save_pretrained(directory)


# --- speed --------------------------------------------------------------------------------------------------


def trl_trainer(directory: Path, steps: int, kl: float, loss: str = "grpo", **more: Any) -> GRPOTrainer:
    arguments = GRPOConfig(
        output_dir=str(directory / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        beta=kl,
        loss_type=loss,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **more,
    )
    network = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    data = Dataset.from_dict({"prompt": TEXTS})
    return GRPOTrainer(network, digits, args=arguments, train_dataset=data, processing_class=tokenizer)


class Alternating(TrainerCallback):
    """Runs one of our iterations after each step of TRL's; notes the seconds of both."""

    def __init__(self, ours: Callable[[], None]) -> None:
        self.ours, self.trl_s, self.our_s = ours, list[float](), list[float]()
        self.since = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        start = time.perf_counter()
        self.trl_s.append(start - self.since)
        self.ours()
        self.since = time.perf_counter()
        self.our_s.append(self.since - start)


def our_config(directory: Path, kl: float, name: str, **algorithm: Any) -> MathConfig:
    values = {"name": name, "lr": LR, "kl_coef": kl, "max_grad_norm": 1.0, **algorithm}
    content = {
        "model": {"path": str(directory)},
        "sampling": {"prompts": PROMPTS, "group_size": GROUP, "max_new_tokens": TOKENS},
        "reward": {"functions": {"grpo_vs_trl:digits": 1.0}},
        "algorithm": values,
        "cluster": {"cpu_slots": THREADS},
    }
    return with_preset(MathConfig.model_validate(content))


def time_both(directory: Path, steps: int, kl: float) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of a step and of its parts: TRL's, and ours, the weights' way to the sampler included."""
    trainer = trl_trainer(directory, steps, kl)
    trl_parts, our_parts = ({"generation": [], "log-probs": []} for _ in range(2))

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = function(*args, **kwargs)
            if name == "generation" or not torch.is_grad_enabled():  # else it is part of the update
                trl_parts[name].append(time.perf_counter() - start)
            return found

        return call

    trainer._generate_single_turn = timed("generation", trainer._generate_single_turn)
    trainer._get_per_token_logps_and_entropies = timed("log-probs", trainer._get_per_token_logps_and_entropies)
    with Cluster(cpu_slots=THREADS) as cluster:
        team = MathTeam(our_config(directory, kl, "grpo"), cluster)

        def iterate() -> None:
            step = len(alternating.our_s)
            numbers = range(step * PROMPTS, (step + 1) * PROMPTS)
            prompts = [Prompt(Problem(str(n), TEXTS[n % len(TEXTS)], "1"), n) for n in numbers]
            done, _ = team.iterate(step, prompts, steps - step)
            for stage, part in {"sampler.generate": "generation", "actor.refer": "log-probs"}.items():
                our_parts[part].append(sum(sample.seconds for sample in done.samples if sample.stage == stage))

        alternating = Alternating(iterate)
        trainer.add_callback(alternating)
        trainer.train()
        team.close()
    return split(alternating.trl_s, trl_parts), split(alternating.our_s, our_parts)


def split(steps: list[float], parts: dict[str, list[float]]) -> dict[str, float]:
    """Medians without the first step, which warms up."""
    whole = statistics.median(steps[1:])
    found = {name: statistics.median(values[1:] or [0.0]) for name, values in parts.items()}
    return {**found, "update and the rest": whole - sum(found.values()), "step": whole, "fastest step": min(steps[1:])}


# --- the same loss ------------------------------------------------------------------------------------------


def compare_losses(directory: Path, name: str) -> tuple[float, float, float]:
    """|difference| of the loss, the largest of a gradient, and the largest gradient, on one batch with ragged lengths.

    TRL gets the advantages of ours: it adds 1e-4 to the standard deviation, which is 1e-6 here. The log-probs before
    the update differ from the model's, so that ratios are clipped.
    """
    clip = {"epsilon_high": 0.28} if name == "dapo" else {}
    trainer = trl_trainer(directory, 1, 0.0, name, **clip)
    draw, network = torch.Generator().manual_seed(1), trainer.model
    groups = []
    for number in range(PROMPTS):
        ids = torch.randint(1, 64, (6 + number,), generator=draw).tolist()
        completions = []
        for _ in range(GROUP):
            length = int(torch.randint(1, TOKENS + 1, (), generator=draw))
            answer = torch.randint(1, 64, (length,), generator=draw).tolist()
            reward = float(torch.rand((), generator=draw))
            noise = (-4.16 + 0.3 * torch.randn(length, generator=draw)).tolist()
            completions.append(Completion(answer, noise, True, "", {"grpo_vs_trl:digits": reward}, reward))
        groups.append(Group(Prompt(Problem(str(number), "", "1"), number), ids, completions))
    actor = LanguageActor.__new__(LanguageActor)
    actor.config = our_config(directory, 0.0, name, importance_cap=None, token_budget=512)
    actor.context = type("Context", (), {"rank": 0, "world_size": 1})()
    actor.device, actor.reference_model = torch.device("cpu"), None
    actor.policy = LanguageModel(actor.config.model, trains=True, seed=0)
    batch = actor._learnable(groups, Sums())
    batch.old = batch.sampler
    totals, ours = actor._denominators(batch), 0.0
    for rows in actor._cut(batch.samples):
        part = actor._share_of_loss(batch, totals, Sums(), rows)
        part.backward()
        ours += float(part.detach())
    every = [c for group in groups for c in group.completions]
    prompts = [group.prompt_ids for group in groups for _ in group.completions]
    longest, widest = max(map(len, prompts)), max(len(c.ids) for c in every)
    inputs = {
        "prompt_ids": torch.tensor([[0] * (longest - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([c.ids + [0] * (widest - len(c.ids)) for c in every]),
        "completion_mask": torch.tensor([[1] * len(c.ids) + [0] * (widest - len(c.ids)) for c in every]),
        "advantages": batch.advantage,
        "old_per_token_logps": torch.nn.functional.pad(batch.old, (0, widest - batch.old.shape[1])),
        "num_items_in_batch": torch.tensor(float(sum(len(c.ids) for c in every))),
    }
    network.train()
    trainer.current_gradient_accumulation_steps = 1
    theirs = trainer._compute_loss(network, inputs)
    theirs.backward()
    pairs = list(zip(actor.policy.network.parameters(), network.parameters(), strict=True))
    apart = max(float((a.grad - b.grad).abs().max()) for a, b in pairs)
    return abs(ours - float(theirs.detach())), apart, max(float(b.grad.abs().max()) for _, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kl", type=float, nargs="+", default=[0.0, 0.04], help="coefficients of the divergence")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    warnings.simplefilter("ignore", FutureWarning)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_model(directory)
        for algorithm in ("grpo", "dr_grpo", "dapo"):
            loss, gradient, largest = compare_losses(directory, algorithm)
            print(f"{algorithm:8} |loss - TRL's| {loss:.1e}, gradients apart by {gradient:.1e} of up to {largest:.1e}")
        for kl in options.kl:
            theirs, ours = time_both(directory, options.steps, kl)
            print(f"\nKL coefficient {kl:g}, seconds of a step of {PROMPTS * GROUP} samples   TRL    ours")
            for part, seconds in theirs.items():
                print(f"{part:45} {seconds:8.3f} {ours[part]:7.3f}")
            for of in ("step", "fastest step"):
                rates = [PROMPTS * GROUP / found[of] for found in (theirs, ours)]
                name = f"samples/s by the {'median' if of == 'step' else of}"
                print(f"{name:45} {rates[0]:8.1f} {rates[1]:7.1f}   {rates[1] / rates[0]:.2f} x", flush=True)


if __name__ == "__main__":
    main()
