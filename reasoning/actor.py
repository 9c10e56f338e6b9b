"""The actor of a reasoning run: learns from groups of completions. Ranks, gradients, metrics and checkpoints are those
of the embodied actor; what differs is the batch and how its log-probs are computed (`packing.py`).
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from embodied_rl import algorithms as rl
from embodied_rl.sums import Sums
from embodied_rl.workers.actor import ActorWorker
from reasoning.config import MathConfig
from reasoning.data import Problem
from reasoning.models import LanguageModel, encode, load_tokenizer
from reasoning.packing import Row, Sample, cut, token_logprobs
from reasoning.samples import Group
from reasoning.workers import use_cores
from scheduler.stage import Output


@dataclass
class _Batch:
    """Completions to learn from: S of at most L tokens. Log-probs hold 0 beyond a completion's end."""

    samples: list[Sample]
    advantage: Tensor  # [S]
    sampler: Tensor  # [S, L] log-probs when they were drawn
    old: Tensor | None  # [S, L] log-probs before the update; None: those of the first forward pass are
    reference: Tensor | None  # [S, L]

    def rows(self, index: Tensor | list[int], length: int | None = None) -> _Batch:
        index = torch.as_tensor(index, dtype=torch.long, device="cpu")

        def take(x: Tensor | None) -> Any:
            return None if x is None else x[index, :length]

        chosen = [self.samples[number] for number in index.tolist()]
        return _Batch(chosen, self.advantage[index], take(self.sampler), take(self.old), take(self.reference))

    def __len__(self) -> int:
        return len(self.samples)


class LanguageActor(ActorWorker):
    """Holds the language model that learns."""

    config: MathConfig  # type: ignore[assignment]
    policy: LanguageModel  # type: ignore[assignment]

    def __init__(self, config: MathConfig) -> None:
        self.config, self.device = config, use_cores(self)
        self.generator = torch.Generator().manual_seed(config.seed * 1009 + self.rank)
        self.policy = LanguageModel(config.model, trains=True, seed=config.seed).to(self.device)
        self.optimizer = self._new_optimizer(config.algorithm.lr)
        self.reference: LanguageModel | None = None
        if config.algorithm.kl_coef and not self.policy.has_adapters:
            self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        if self.world_size > 1:
            self._join_peers()

    def _new_optimizer(self, lr: float) -> torch.optim.Optimizer:
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        group = {"params": parameters, "lr": lr, "base_lr": lr}
        return torch.optim.AdamW([group], betas=(0.9, 0.95), weight_decay=self.config.algorithm.weight_decay)

    # ------------------------------------------------------------------------------------------ warm start

    def warm_start(self, batches: list[list[Problem]]) -> float:
        """Learn reference answers by cross-entropy, a batch a step, before the first iteration; returns the last loss.

        The optimiser of the iterations begins afresh, and the reference is the model after the warm start.
        """
        tokenizer, loss = load_tokenizer(self.config.model.path), torch.zeros(())
        self.optimizer = self._new_optimizer(self.config.train.warm_start_lr)
        for problems in batches:
            samples = [
                Sample(n, encode(tokenizer, problem), [*tokenizer.encode(problem.answer), tokenizer.eos_token_id])
                for n, problem in enumerate(problems)
            ][self.rank :: self.world_size]
            count = self._total(torch.tensor(sum(len(sample.completion) for sample in samples), dtype=torch.float32))
            self.optimizer.zero_grad()
            loss = torch.zeros(())
            for rows in cut(samples, self.config.algorithm.token_budget):
                logprob, _, _ = token_logprobs(self.policy, samples, rows, 1.0)
                part = -logprob.sum() / count
                part.backward()
                loss = loss + part.detach().cpu()
            self._reduce_and_clip_gradients()
            self.optimizer.step()
        self.optimizer = self._new_optimizer(self.config.algorithm.lr)
        if self.reference is not None:
            self.reference.load_learned_state(self.policy.learned_state())
        return float(self._total(loss))

    # ------------------------------------------------------------------------------------------ stages

    def refer(self, groups: list[Group]) -> list[Group]:
        """The same groups with the log-probs of the model before learning."""
        frozen = self.policy.network.disable_adapter() if self.policy.has_adapters else nullcontext()
        with frozen:
            found = self._logprobs(self.reference or self.policy, _samples(groups))
        completions = [completion for group in groups for completion in group.completions]
        for completion, logprobs in zip(completions, found, strict=True):
            completion.reference = logprobs[: len(completion.ids)].tolist()
        return groups

    def update(self, groups: list[Group]) -> Output:  # type: ignore[override]
        """Learn from this rank's share of an iteration's groups.

        Gives the new parameters (rank 0 does); reports the metrics, the same on every rank, and a group to show.
        """
        sums = Sums()
        batch = self._prepare(groups, sums)
        self._set_learning_rate(self.iteration)
        sums.add("losses/learning_rate", self.optimizer.param_groups[0]["lr"])
        count = int(self._total(torch.tensor(len(batch))))
        sums.add("losses/samples", count)
        sums.add("grpo/empty_iteration", float(count == 0))
        if count:
            self._optimise(batch, sums)  # type: ignore[arg-type]
        report = {"metrics": sums.means(self._total), "shown": groups[:1]}
        return Output(self.weights([]) if self.rank == 0 else [], report)

    # ------------------------------------------------------------------------------------------ the batch

    def _prepare(self, groups: list[Group], sums: Sums) -> _Batch:  # type: ignore[override]
        """Advantages, and only the completions that count."""
        algorithm, samples = self.config.algorithm, _samples(groups)
        completions = [completion for group in groups for completion in group.completions]
        self._describe(groups, sums)
        group_id = torch.tensor([sample.group for sample in samples], dtype=torch.long)
        valid = torch.tensor([c.reward is not None for c in completions], dtype=torch.bool)
        score = torch.tensor([c.reward or 0.0 for c in completions], dtype=torch.float64)
        batch = _Batch(
            samples,
            torch.zeros(len(samples)),
            _padded([c.logprobs for c in completions]),
            None,
            _padded([c.reference for c in completions if c.reference]) if algorithm.kl_coef else None,
        )
        penalised = bool(algorithm.kl_coef) and algorithm.kl_in == "reward"
        if penalised or algorithm.epochs * algorithm.minibatches > 1:
            batch.old = _padded([row.tolist() for row in self._logprobs(self.policy, samples)])
        kept = valid
        if algorithm.drop_flat_groups:  # judged by the rewards themselves, without the penalty below
            kept = rl.group_advantages(score, group_id, "dr_grpo", valid=valid) != 0
            kept = torch.isin(group_id, group_id[kept]) & valid
        if penalised and batch.old is not None and batch.reference is not None:
            mask = torch.arange(batch.old.shape[1]) < torch.tensor([len(s.completion) for s in samples])[:, None]
            score = score - algorithm.kl_coef * rl.kl_penalty(batch.old, batch.reference, algorithm.kl, mask).sum(1)
        whitens = algorithm.group_advantage == "reinforce_baseline"  # over the batch of all ranks
        kind = "dr_grpo" if whitens else algorithm.group_advantage or "grpo"
        batch.advantage = rl.group_advantages(score, group_id, kind, valid=valid)
        if whitens:
            batch.advantage = self._normalise(batch.advantage, valid)
        self._mean(sums, "grpo/kept_fraction", kept.float())
        return batch.rows(kept.nonzero()[:, 0])

    def _describe(self, groups: list[Group], sums: Sums) -> None:
        """Metrics of what was sampled, over all ranks."""
        completions = [completion for group in groups for completion in group.completions]
        lengths = torch.tensor([float(len(c.ids)) for c in completions])
        self._mean(sums, "completions/mean_length", lengths)
        self._mean(sums, "completions/clipped_fraction", torch.tensor([float(not c.finished) for c in completions]))
        self._mean(sums, "reward/mean", torch.tensor([c.reward for c in completions if c.reward is not None]))
        self._mean(sums, "reward/undecided_fraction", torch.tensor([float(c.reward is None) for c in completions]))
        for name in self.config.reward.functions:
            known = [c.rewards[name] for c in completions if c.rewards[name] is not None]
            self._mean(sums, f"reward/{name}", torch.tensor(known))
        flat = [len({c.reward for c in g.completions if c.reward is not None}) < 2 for g in groups]
        self._mean(sums, "grpo/zero_std_fraction", torch.tensor(flat, dtype=torch.float32))
        stale = [float(self.iteration - group.version) for group in groups]
        self._mean(sums, "sampling/staleness", torch.tensor(stale))
        sums.add("completions/tokens", float(self._total(lengths.sum())))

    def _mean(self, sums: Sums, name: str, values: Tensor) -> None:
        """The mean over the values of all ranks; nothing where there is none."""
        count, total, _ = (self._total(m) for m in rl.masked_moments(values, torch.ones_like(values, dtype=torch.bool)))
        if count:
            sums.add(name, float(total / count))

    @torch.no_grad()
    def _logprobs(self, model: LanguageModel, samples: list[Sample]) -> list[Tensor]:
        """Log-probs of each sample's completion, on the CPU, in the order of the samples."""
        found: dict[int, Tensor] = {}
        for rows in cut(samples, self.config.algorithm.token_budget):
            logprob, _, _ = token_logprobs(model, samples, rows, self.config.sampling.temperature)
            for place, number in enumerate(number for row in rows for number in row.numbers):
                found[number] = logprob[place, : len(samples[number].completion)].cpu()
        return [found[number] for number in range(len(samples))]

    # ------------------------------------------------------------------------------------------ one step

    def _step(self, minibatch: _Batch, sums: Sums) -> bool:  # type: ignore[override]
        """One optimiser step."""
        totals = self._normalisers(minibatch)
        sums.begin_minibatch()
        self.optimizer.zero_grad()
        for rows in cut(minibatch.samples, self.config.algorithm.token_budget):
            self._loss(minibatch, totals, sums, rows).backward()
        sums.add("losses/grad_norm", float(self._reduce_and_clip_gradients()))
        self.optimizer.step()
        return True

    def _normalisers(self, minibatch: _Batch) -> dict[str, Tensor]:  # type: ignore[override]
        """Global denominators: of the policy terms at the level of the ratio, and of terms for each token."""
        algorithm, longest = self.config.algorithm, self.config.sampling.max_new_tokens
        lengths = torch.tensor([len(sample.completion) for sample in minibatch.samples])
        mask = torch.arange(int(lengths.max()) if len(lengths) else 1) < lengths[:, None]
        mode = algorithm.aggregation or "token-mean"
        tokens = self._total(lengths.sum().float().to(self.device))
        is_by_token = algorithm.ratio_level == "token"
        by_token = self._total(rl.normaliser(mask, mode, longest).to(self.device))
        by_sequence = self._total(rl.normaliser(mask.any(1), mode, 1).to(self.device))
        return {
            "policy": by_token if is_by_token else by_sequence,
            "elements": tokens if is_by_token else self._total(torch.tensor(float(len(lengths)), device=self.device)),
            "kl": by_token,
            "tokens": tokens,
        }

    def _loss(  # type: ignore[override]
        self, minibatch: _Batch, totals: dict[str, Tensor], sums: Sums, rows: list[Row]
    ) -> Tensor:
        """The rows' share of the global loss."""
        algorithm = self.config.algorithm
        mode, level = algorithm.aggregation or "token-mean", algorithm.ratio_level or "token"
        logprob, entropy, mask = token_logprobs(self.policy, minibatch.samples, rows, self.config.sampling.temperature)
        micro = minibatch.rows([number for row in rows for number in row.numbers], logprob.shape[1])
        sampler, advantage = micro.sampler.to(self.device), micro.advantage.to(self.device)
        old = logprob.detach() if micro.old is None else micro.old.to(self.device)
        ratio, valid = rl.log_ratio(logprob[..., None], old[..., None], mask, level)
        ratio, valid = (x.squeeze(-1) if level == "token" else x for x in (ratio, valid))
        clip_low, clip_high = algorithm.clip_low or 0.2, algorithm.clip_high or 0.2
        if algorithm.loss == "cispo":
            policy = rl.cispo_loss(ratio, logprob, advantage, valid, clip_low, clip_high)
        else:
            policy = rl.policy_loss(ratio, advantage, valid, clip_low, clip_high, algorithm.dual_clip)
        per_element = policy.loss
        if algorithm.importance_cap is not None:
            gap, _ = rl.log_ratio(old[..., None], sampler[..., None], mask, level)
            gap = gap.squeeze(-1) if level == "token" else gap
            weight = rl.importance_weight(gap, torch.zeros_like(gap), algorithm.importance_cap, valid)
            per_element = per_element * weight
            sums.add_part("sampling/importance_weight", weight.sum() / totals["elements"])
        loss = policy_part = rl.reduce(per_element, valid, mode, totals["policy"])
        if micro.reference is not None:
            kl = rl.kl_penalty(logprob, micro.reference.to(self.device), algorithm.kl, mask)
            sums.add_part("losses/kl", kl.sum() / totals["tokens"])
            if algorithm.kl_in == "loss":
                loss = loss + algorithm.kl_coef * rl.reduce(kl, mask, mode, totals["kl"])
        difference = (logprob.detach() - sampler).abs()
        sums.add_part("sampling/logprob_gap_mean", torch.where(mask, difference, 0.0).sum() / totals["tokens"])
        sums.add_part("losses/policy", policy_part)
        sums.add_part("losses/entropy", entropy.sum() / totals["tokens"])
        sums.add_part("losses/approx_kl", policy.approx_kl.sum() / totals["elements"])
        sums.add_part("losses/clip_fraction", policy.clipped.float().sum() / totals["elements"])
        return loss

    # ------------------------------------------------------------------------------------------ state

    def export(self, directory: Path) -> None:
        """Write the model in the Hugging Face format, adapters merged (rank 0 does)."""
        if self.rank == 0:
            network = self.policy.network
            network = copy.deepcopy(network).merge_and_unload() if self.policy.has_adapters else network
            network.save_pretrained(directory)
            load_tokenizer(self.config.model.path).save_pretrained(directory)

    def state(self) -> dict[str, Any]:
        return {
            "policy": self.policy.learned_state(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "reference": self.reference.learned_state() if self.reference else None,
        }

    def restore(self, states: list[Any]) -> None:
        self.policy.load_learned_state(states[0]["policy"])
        self.optimizer.load_state_dict(states[0]["optimizer"])
        self.generator.set_state(states[self.rank % len(states)]["generator"])
        if self.reference is not None:
            self.reference.load_learned_state(states[0]["reference"])


def _samples(groups: list[Group]) -> list[Sample]:
    return [Sample(group.prompt.number, group.prompt_ids, c.ids) for group in groups for c in group.completions]


def _padded(rows: list[list[float]]) -> Tensor:
    """[S, L], 0 beyond the end of a row."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True) if rows else torch.zeros(0, 1)
