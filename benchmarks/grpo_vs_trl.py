"""GRPO by TRL's GRPOTrainer and by this project: samples per second, and the loss and gradients on one batch.

    pip install --target ../trl --no-deps trl datasets dill xxhash multiprocess pandas httpx
    PYTHONPATH=../trl python benchmarks/grpo_vs_trl.py

TRL is installed for this only. Both get the same Llama of 4.8 M parameters with random weights, the same prompts, 8
completions of each of 8 prompts in a step, the same reward, float32, one update a step, and two threads. Steps of both
take turns, so that they meet the same load. TRL recomputes activations in the backward pass unless told otherwise; it
is measured as it comes, and without. With a divergence from a reference model, the log-probs of that are computed too.

What decides how they compare is how much of the work is the prompt, and how much the lengths of answers differ:

problems    prompts of 40 to 120 tokens, as word problems have; answers end by chance, after 50 tokens on average and
            96 at most
sums        prompts of 6 to 12 tokens; 32 tokens in every answer, since the token that ends one cannot be drawn: the
            least that there is to gain
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.utils import logging as transformers_logging

from embodied_rl.sums import Sums
from reasoning.actor import LanguageActor
from reasoning.config import MathConfig, with_preset
from reasoning.data import Problem
from reasoning.models import LanguageModel
from reasoning.samples import Completion, Group, Prompt
from reasoning.team import MathTeam
from scheduler.cluster import Cluster

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl import __version__ as trl_version
except ImportError as error:
    raise SystemExit(f"{__doc__}\n{error}: install TRL by the first of the two commands above") from None

PROMPTS, GROUP, THREADS, LR = 8, 8, 2, 1e-6
PLACEMENT = "sampler, judge, actor: all"


@dataclass(frozen=True)
class Workload:
    """Prompts by their text, tokens of an answer at most, and whether the token that ends one can be drawn."""

    texts: list[str]
    tokens: int
    ends: bool


WORKLOADS = {
    "problems": Workload([("abcdefg hi" * 12)[: 36 + 40 * n % 81] + f"{n:02}?=" for n in range(64)], 96, True),
    "sums": Workload([f"{'ab' * (n % 4)}{n:02}+{7 * n % 100:02}=" for n in range(64)], 32, False),
}


def digits(completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of digits."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def save_model(directory: Path, ends: bool) -> None:
    """A Llama whose vocabulary has 64 tokens, and, if answers end, a further one that ends them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = "0123456789+-*/=()?. abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQ"
    vocabulary = {token: number for number, token in enumerate(["<pad>", *characters, "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(directory)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=65 if ends else 64,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=64 if ends else None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    network = LlamaForCausalLM(shape)
    print(f"{sum(p.numel() for p in network.parameters()):,} parameters, {THREADS} threads, TRL {trl_version}")
    network.save_pretrained(directory)


# --- speed --------------------------------------------------------------------------------------------------


def trl_trainer(
    directory: Path, work: Workload, steps: int, kl: float, loss: str = "grpo", recomputes: bool = False, **more: Any
) -> GRPOTrainer:
    arguments = GRPOConfig(
        output_dir=str(directory / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=recomputes,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=work.tokens,
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
    data = Dataset.from_dict({"prompt": work.texts})
    return GRPOTrainer(network, digits, args=arguments, train_dataset=data, processing_class=tokenizer)


class Alternating(TrainerCallback):
    """Runs one of our iterations after each step of TRL's; notes what both took."""

    def __init__(self, ours: Callable[[], None], workers: list[int]) -> None:
        self.ours, self.workers = ours, [psutil.Process(pid) for pid in workers]
        self.trl: dict[str, list[float]] = {"step": [], "processor seconds": []}
        self.our: dict[str, list[float]] = {"step": [], "processor seconds": []}
        self.since = time.perf_counter(), self._processor_s()

    def _processor_s(self) -> float:
        return time.process_time() + sum(sum(worker.cpu_times()[:2]) for worker in self.workers)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._note(self.trl)
        self.ours()
        self._note(self.our)

    def _note(self, found: dict[str, list[float]]) -> None:
        now = time.perf_counter(), self._processor_s()
        for name, before, after in zip(("step", "processor seconds"), self.since, now, strict=True):
            found[name].append(after - before)
        self.since = now


def our_config(
    directory: Path, tokens: int, kl: float, name: str, placement: str = PLACEMENT, **algorithm: Any
) -> MathConfig:
    values = {"name": name, "lr": LR, "kl_coef": kl, "max_grad_norm": 1.0, **algorithm}
    content = {
        "placement": placement,
        "model": {"path": str(directory)},
        "sampling": {"prompts": PROMPTS, "group_size": GROUP, "max_new_tokens": tokens},
        "reward": {"functions": {"grpo_vs_trl:digits": 1.0}},
        "algorithm": values,
        "cluster": {"cpu_slots": THREADS},
    }
    return with_preset(MathConfig.model_validate(content))


STAGES = {"sampler.generate": "generation", "actor.refer": "log-probs", "actor.update": "update"}


def time_both(
    directory: Path, work: Workload, steps: int, kl: float, recomputes: bool, placement: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a step and of its parts: TRL's, and ours, the weights' way to the sampler included."""
    trainer = trl_trainer(directory, work, steps, kl, recomputes=recomputes)
    lengths: list[float] = []
    trl_parts, our_parts = ({"generation": [], "log-probs": [], "update": []} for _ in range(2))

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start, is_part = time.perf_counter(), name != "log-probs" or not torch.is_grad_enabled()
            found = function(*args, **kwargs)
            if is_part:  # log-probs that gradients are taken of are part of the update
                trl_parts[name].append(time.perf_counter() - start)
            return found

        return call

    trainer._generate_single_turn = timed("generation", trainer._generate_single_turn)
    trainer._get_per_token_logps_and_entropies = timed("log-probs", trainer._get_per_token_logps_and_entropies)
    trainer.compute_loss = timed("update", trainer.compute_loss)
    trainer.accelerator.backward = timed("update", trainer.accelerator.backward)
    with Cluster(cpu_slots=THREADS) as cluster:
        team = MathTeam(our_config(directory, work.tokens, kl, "grpo", placement), cluster)

        def iterate() -> None:
            step = len(alternating.our["step"])
            numbers = range(step * PROMPTS, (step + 1) * PROMPTS)
            prompts = [Prompt(Problem(str(n), work.texts[n % len(work.texts)], "1"), n) for n in numbers]
            done, _ = team.iterate(step, prompts, steps - step)
            lengths.append(done.reports["actor.update"][0]["metrics"]["completions/mean_length"])

        alternating = Alternating(iterate, list(team.process_ids().values()))
        trainer.add_callback(alternating)
        trainer.train()
        for event in team.drain_trace():
            if event.category == "work" and event.name in STAGES and event.track.endswith("[0]"):
                our_parts[STAGES[event.name]].append(event.end - event.start)
        team.close()
    their_length = trainer.state.log_history[-1]["completions/mean_length"]
    theirs = {**split(alternating.trl, trl_parts), "tokens of an answer": their_length}
    return theirs, {**split(alternating.our, our_parts), "tokens of an answer": statistics.mean(lengths)}


def split(whole: dict[str, list[float]], parts: dict[str, list[float]]) -> dict[str, float]:
    """Medians without the first step, which warms up. A part may come in several pieces in a step."""
    steps, found = len(whole["step"]), {}
    for name, pieces in parts.items():
        each = len(pieces) // steps
        by_step = [sum(pieces[each * step : each * (step + 1)]) for step in range(steps)]
        found[name] = statistics.median(by_step[1:])
    medians = {name: statistics.median(values[1:]) for name, values in whole.items()}
    found["the rest"] = medians["step"] - sum(found.values())
    return {**found, **medians, "fastest step": min(whole["step"][1:])}


# --- the same loss ------------------------------------------------------------------------------------------


def compare_losses(directory: Path, work: Workload, name: str) -> tuple[float, float, float]:
    """|difference| of the loss, the largest of a gradient, and the largest gradient, on one batch with ragged lengths.

    TRL gets the advantages of ours: it adds 1e-4 to the standard deviation, which is 1e-6 here. The log-probs before
    the update differ from the model's, so that ratios are clipped.
    """
    clip = {"epsilon_high": 0.28} if name == "dapo" else {}
    trainer = trl_trainer(directory, work, 1, 0.0, name, **clip)
    draw, network = torch.Generator().manual_seed(1), trainer.model
    groups = []
    for number in range(PROMPTS):
        ids = torch.randint(1, 64, (6 + number,), generator=draw).tolist()
        completions = []
        for _ in range(GROUP):
            length = int(torch.randint(1, work.tokens + 1, (), generator=draw))
            answer = torch.randint(1, 64, (length,), generator=draw).tolist()
            reward = float(torch.rand((), generator=draw))
            noise = (-4.16 + 0.3 * torch.randn(length, generator=draw)).tolist()
            completions.append(Completion(answer, noise, True, "", {"grpo_vs_trl:digits": reward}, reward))
        groups.append(Group(Prompt(Problem(str(number), "", "1"), number), ids, completions))
    actor = LanguageActor.__new__(LanguageActor)
    actor.config = our_config(directory, work.tokens, 0.0, name, importance_cap=None, token_budget=512)
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
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kl", type=float, nargs="+", default=[0.0, 0.04], help="coefficients of the divergence")
    parser.add_argument("--placement", default=PLACEMENT, help="of our workers")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    warnings.simplefilter("ignore", FutureWarning)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in options.workload:
        with tempfile.TemporaryDirectory() as directory:
            measure(Path(directory), name, options)


def measure(directory: Path, name: str, options: argparse.Namespace) -> None:
    work = WORKLOADS[name]
    print(f"\n{name}: ", end="")
    save_model(directory, work.ends)
    for algorithm in ("grpo", "dr_grpo", "dapo"):
        loss, gradient, largest = compare_losses(directory, work, algorithm)
        print(f"{algorithm:8} |loss - TRL's| {loss:.1e}, gradients apart by {gradient:.1e} of up to {largest:.1e}")
    for kl, recomputes in itertools.product(options.kl, (True, False)):
        theirs, ours = time_both(directory, work, options.steps, kl, recomputes, options.placement)
        how = "recomputing activations" if recomputes else "keeping activations"
        print(f"\n{name}, KL coefficient {kl:g}, TRL {how}; seconds of a step of {PROMPTS * GROUP} samples")
        print(f"{'':32} {'TRL':>8} {'ours':>7}")
        for part, seconds in theirs.items():
            print(f"{part:32} {seconds:8.3f} {ours[part]:7.3f}")
        for of in ("step", "fastest step", "processor seconds"):
            rates = [PROMPTS * GROUP / found[of] for found in (theirs, ours)]
            print(f"samples/s, {of:21} {rates[0]:8.1f} {rates[1]:7.1f}   {rates[1] / rates[0]:.2f} x", flush=True)


if __name__ == "__main__":
    main()
