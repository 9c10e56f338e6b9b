"""The actor of a reasoning run: learns from groups of completions. Ranks, gradients, metrics and checkpoints are those
of the embodied actor; what differs is the batch (`batch.py`), its loss (`loss.py`) and how log-probs are computed
(`packing.py`).
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_rl import algorithms as rl
from embodied_rl.sums import Sums
from embodied_rl.workers.actor import CRITIC, ActorWorker
from embodied_rl.workers.parity import Gap, Limit
from reasoning.batch import Batch, differ, judged, padded, samples_of
from reasoning.config import MathConfig
from reasoning.data import Problem
from reasoning.loss import MEAN_OVER, denominators, share_of_loss
from reasoning.models import LanguageModel, encode, load_tokenizer
from reasoning.packing import Row, Sample, cut, token_scores
from reasoning.samples import Group
from reasoning.workers import use_cores
from scheduler.stage import Output


class LanguageActor(ActorWorker):
    """Holds the language model that learns."""

    config: MathConfig  # type: ignore[assignment]
    policy: LanguageModel  # type: ignore[assignment]

    def __init__(self, config: MathConfig) -> None:
        self.config, self.device = config, use_cores(self)
        self.generator = torch.Generator().manual_seed(config.seed * 1009 + self.rank)
        has_critic = config.algorithm.name == "ppo"
        self.policy = LanguageModel(config.model, trains=True, seed=config.seed, has_critic=has_critic).to(self.device)
        self.optimizer = self._new_optimizer(config.algorithm.lr)
        self.reference_model: LanguageModel | None = None
        if config.algorithm.kl_coef and not self.policy.has_adapters:
            self.reference_model = copy.deepcopy(self.policy).requires_grad_(False)
        self.warms_up = self.has_learned = False
        self.spec = None  # type: ignore[assignment]
        self.waiting: list[Group] = []  # of this iteration, until enough of them can be learned from
        self.accumulated: tuple[Sums, dict[str, Tensor]] | None = None
        if self.world_size > 1:
            self._join_peers()

    def _new_optimizer(self, lr: float) -> torch.optim.Optimizer:
        critic = [] if self.policy.critic is None else list(self.policy.critic.parameters())
        rates = {lr: [p for p in self.policy.network.parameters() if p.requires_grad]}
        rates.setdefault(self.config.algorithm.value_lr, []).extend(critic)
        groups = [{"params": parameters, "lr": rate, "base_lr": rate} for rate, parameters in rates.items()]
        decay = self.config.algorithm.weight_decay
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=decay, fused=True)

    # ------------------------------------------------------------------------------------------ warm start

    def warm_start(self, batches: list[list[Problem]]) -> float:
        """Learn reference answers by cross-entropy, a batch a step, before the first iteration; returns the last loss.

        The optimiser of the iterations begins afresh, and the reference is the model after the warm start.
        """
        tokenizer, loss = load_tokenizer(self.config.model.path), torch.zeros(())
        self.optimizer = self._new_optimizer(self.config.train.warm_start_lr)
        for problems in batches:
            samples = [
                Sample(n, encode(tokenizer, problem), _answer_ids(tokenizer, problem))
                for n, problem in enumerate(problems)
            ][self.rank :: self.world_size]
            count = self._total(torch.tensor(sum(len(sample.completion) for sample in samples), dtype=torch.float32))
            self.optimizer.zero_grad()
            loss = torch.zeros(())
            for rows in self._cut(samples):
                part = -token_scores(self.policy, samples, rows, 1.0).logprob.sum() / count
                part.backward()
                loss = loss + part.detach().cpu()
            self._reduce_and_clip_gradients()
            self.optimizer.step()
        self.optimizer = self._new_optimizer(self.config.algorithm.lr)
        if self.reference_model is not None:
            self.reference_model.load_learned_state(self.policy.learned_state())
        return float(self._total(loss))

    # ------------------------------------------------------------------------------------------ stages

    def refer(self, groups: list[Group]) -> list[Group]:
        """The same groups with the log-probs of the model before learning."""
        frozen = self.policy.network.disable_adapter() if self.policy.has_adapters else nullcontext()
        with frozen:
            found, _ = self._score(self.reference_model or self.policy, samples_of(groups))
        completions = [completion for group in groups for completion in group.completions]
        for completion, logprobs in zip(completions, found, strict=True):
            completion.reference = logprobs[: len(completion.ids)].tolist()
        return groups

    def accumulate(self, groups: list[Group]) -> list[Group]:
        """Gradients of some groups, not yet divided by the counts of the whole batch. Talks to no other rank."""
        if self.accumulated is None:
            self.optimizer.zero_grad()
            self.gap = Gap()
            self.accumulated = Sums(), {}
            self.accumulated[0].begin_minibatch()
        sums, counts = self.accumulated
        batch, kept = self._judge(groups)
        batch = batch.rows(kept.nonzero()[:, 0])
        for name, count in denominators(self.config, batch, self.device).items():
            counts[name] = counts.get(name, torch.zeros(())) + count
        self._backward(batch, dict.fromkeys(counts, torch.ones((), device=self.device)), sums)
        return groups

    def update(self, groups: list[Group], is_last: bool = True) -> Output:  # type: ignore[override]
        """Learn from this rank's share of an iteration's groups; those that were accumulated only need the step.

        Gives the new parameters (rank 0 does). Reports the metrics, the same on every rank, and a group to show; or, if
        others are to be sampled in place of groups of equal rewards (`is_last` False), how many are missing.
        """
        if stale := [group.version for group in groups if self.iteration - group.version > self.config.sampling.ahead]:
            raise RuntimeError(f"iteration {self.iteration} was given completions of version {min(stale)}")
        self.waiting += groups
        if not is_last:
            useful = sum(differ(map(judged, group.completions)) for group in self.waiting)
            missing = self.config.sampling.prompts - int(self._total(torch.tensor(useful)))
            if missing > 0:
                return Output([], {"missing": missing})
        groups, self.waiting = self.waiting, []
        sums, counts = self.accumulated or (Sums(), {})
        self.accumulated = None
        self._set_learning_rate(self.iteration)
        sums.add("losses/learning_rate", self.optimizer.param_groups[0]["lr"])
        self._describe(groups, sums)
        batch = self._learnable(groups, sums)
        samples = int(self._total(torch.tensor(len(batch))))
        sums.add("losses/samples", samples)
        sums.add("grpo/empty_iteration", float(samples == 0))
        if samples and self.config.algorithm.elastic:
            self._step_accumulated(sums, counts)
        elif samples:
            self.gap = Gap()
            self._learn_from(batch, sums)
        metrics = sums.means(self._total)
        if not self.has_learned and all(group.version == self.iteration for group in groups):
            self._require_equal_models(metrics)
        self.has_learned |= samples > 0
        report = {"metrics": metrics, "shown": groups[:1], "missing": 0}
        return Output(self.weights([]) if self.rank == 0 else [], report)

    def weights(self, _: list[Any]) -> list[dict[str, Tensor]]:
        """The parameters that learning changes, for the samplers, which have no critic."""
        [state] = super().weights([])
        return [{name: tensor for name, tensor in state.items() if not name.startswith(CRITIC)}]

    def _require_equal_models(self, metrics: dict[str, float]) -> None:
        """In the first update, the sampler must have scored its tokens as this model did before it."""
        apart, limit = metrics.get("sampling/logprob_gap_mean", 0.0), Limit.of(self.policy, self.policy.autocast).mean
        if not apart <= limit:
            raise RuntimeError(
                f"before the first update, log-probabilities of the actor and of the sampler are {apart:.3g} apart on "
                f"average (rounding explains {limit}), {metrics['sampling/logprob_gap_max']:.3g} at most. Likely: they "
                f"have other parameters or another temperature (sampling.engine={self.config.sampling.engine})"
            )

    # ------------------------------------------------------------------------------------------ the batch

    def _learnable(self, groups: list[Group], sums: Sums) -> Batch:
        """Advantages, and only the completions that count."""
        batch, kept = self._judge(groups)
        if self.config.algorithm.group_advantage == "reinforce_baseline":  # over the batch of all ranks
            batch.advantage = self._normalise(batch.advantage, kept)
        if batch.value is not None and batch.returns is not None:
            mask = batch.mask & kept[:, None]
            batch.advantage = self._normalise(batch.advantage, mask)
            variance = self._explained_variance(batch.value, batch.returns, mask)
            sums.add("losses/explained_variance", variance)
        self._mean(sums, "grpo/kept_fraction", kept.float())
        return batch.rows(kept.nonzero()[:, 0])

    def _judge(self, groups: list[Group]) -> tuple[Batch, Tensor]:
        """Advantages as far as a group decides them, and which completions [S] count."""
        algorithm, samples = self.config.algorithm, samples_of(groups)
        completions = [completion for group in groups for completion in group.completions]
        group_id = torch.tensor([sample.group for sample in samples], dtype=torch.long)
        kept = torch.tensor([c.reward is not None for c in completions], dtype=torch.bool)
        score = torch.tensor([c.reward or 0.0 for c in completions], dtype=torch.float64)
        batch = Batch(
            samples,
            torch.zeros(len(samples)),
            padded([c.logprobs for c in completions]),
            None,
            padded([c.reference for c in completions if c.reference]) if algorithm.kl_coef else None,
        )
        penalised = bool(algorithm.kl_coef) and algorithm.kl_in == "reward"
        if penalised or algorithm.name == "ppo" or algorithm.epochs * algorithm.minibatches > 1:
            logprobs, values = self._score(self.policy, samples)
            batch.old = padded([row.tolist() for row in logprobs])
            batch.value = padded([row.tolist() for row in values]) if values else None
        valid = kept
        if algorithm.drop_flat_groups:
            teaches = [differ(map(judged, group.completions)) for group in groups for _ in group.completions]
            kept = valid & torch.tensor(teaches, dtype=torch.bool)
        mask = batch.mask
        penalty = torch.zeros(mask.shape)
        if penalised and batch.old is not None and batch.reference is not None:
            penalty = algorithm.kl_coef * rl.kl_penalty(batch.old, batch.reference, algorithm.kl, mask)
        if batch.value is not None:
            batch.advantage, batch.returns = self._token_advantages(score.float(), penalty, batch.value, mask)
            return batch, kept
        kind = algorithm.group_advantage or "grpo"
        kind = "dr_grpo" if kind == "reinforce_baseline" else kind
        batch.advantage = rl.group_advantages(score - penalty.sum(1), group_id, kind, valid=valid)
        return batch, kept

    def _token_advantages(self, score: Tensor, penalty: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns of tokens [S, L]: the reward comes with the last one, penalties with each."""
        is_last = mask & ~torch.nn.functional.pad(mask, (0, 1))[:, 1:]
        reward = torch.where(is_last, score[:, None], 0.0) - penalty
        following = torch.nn.functional.pad(value, (0, 1))[:, 1:]
        never, algorithm = torch.zeros_like(is_last.T), self.config.algorithm
        advantage, returns = rl.gae(
            reward.T, value.T, following.T, is_last.T, never, algorithm.gamma, algorithm.lam, mask.T
        )
        return advantage.T, returns.T

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
        flat = [float(not differ(c.reward for c in group.completions)) for group in groups]
        self._mean(sums, "grpo/zero_std_fraction", torch.tensor(flat))
        stale = [float(self.iteration - group.version) for group in groups]
        self._mean(sums, "sampling/staleness", torch.tensor(stale))
        sums.add("completions/tokens", float(self._total(lengths.sum())))

    def _mean(self, sums: Sums, name: str, values: Tensor) -> None:
        """The mean over the values of all ranks; nothing where there is none."""
        count, total, _ = (self._total(m) for m in rl.masked_moments(values, torch.ones_like(values, dtype=torch.bool)))
        if count:
            sums.add(name, float(total / count))

    @torch.no_grad()
    def _score(self, model: LanguageModel, samples: list[Sample]) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs of each sample's completion, on the CPU, in the order of the samples; and values, with a critic."""
        found: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        for rows in self._cut(samples):
            scores = token_scores(model, samples, rows, self.config.sampling.temperature)
            for place, number in enumerate(number for row in rows for number in row.numbers):
                length = len(samples[number].completion)
                found[number] = scores.logprob[place, :length].cpu()
                if scores.value is not None:
                    values[number] = scores.value[place, :length].cpu()
        return [found[number] for number in range(len(samples))], [values[number] for number in sorted(values)]

    # ------------------------------------------------------------------------------------------ one step

    def _learn_from(self, batch: Batch, sums: Sums) -> None:
        algorithm = self.config.algorithm
        for _ in range(algorithm.epochs):
            for index in torch.randperm(len(batch), generator=self.generator).tensor_split(algorithm.minibatches):
                self._one_step(batch.rows(index), sums)

    def _one_step(self, minibatch: Batch, sums: Sums) -> None:
        """One optimiser step; none without a completion on any rank."""
        totals = self._denominators(minibatch)
        if not totals["elements"]:  # fewer completions than minibatches
            return
        sums.begin_minibatch()
        self.optimizer.zero_grad()
        self._backward(minibatch, totals, sums)
        self._note_gap(sums)
        sums.add("losses/grad_norm", float(self._reduce_and_clip_gradients()))
        self.optimizer.step()

    def _step_accumulated(self, sums: Sums, counts: dict[str, Tensor]) -> None:
        """The optimiser step of an iteration whose gradients were accumulated."""
        none = denominators(self.config, Batch([], torch.zeros(0), torch.zeros(0, 1), None, None), self.device)
        totals = {name: self._total(counts.get(name, zero)) for name, zero in none.items()}
        if not counts:  # this rank was given no group
            self.optimizer.zero_grad()
            self.gap = Gap()
            sums.begin_minibatch()
        self._note_gap(sums)
        for parameter in self.policy.parameters():
            if parameter.grad is not None:
                parameter.grad /= totals["policy"]
        sums.divide({name: totals[count] for name, count in MEAN_OVER.items()})
        sums.add("losses/grad_norm", float(self._reduce_and_clip_gradients()))
        self.optimizer.step()

    def _note_gap(self, sums: Sums) -> None:
        """The distance of sampler and actor in an iteration's first step."""
        if self.gap is not None:
            for name, value in self.gap.metrics(self._total, self._largest).items():
                sums.add(name, value)
            self.gap = None

    def _cut(self, samples: list[Sample]) -> list[list[Row]]:
        return cut(samples, self.config.algorithm.token_budget, self.policy.network.config.hidden_size)

    def _backward(self, minibatch: Batch, totals: dict[str, Tensor], sums: Sums) -> None:
        for rows in self._cut(minibatch.samples):
            self._share_of_loss(minibatch, totals, sums, rows).backward()

    def _denominators(self, minibatch: Batch) -> dict[str, Tensor]:
        """The denominators over all ranks."""
        counts = denominators(self.config, minibatch, self.device)
        return {name: self._total(count) for name, count in counts.items()}

    def _share_of_loss(self, minibatch: Batch, totals: dict[str, Tensor], sums: Sums, rows: list[Row]) -> Tensor:
        """The rows' share of the global loss."""
        scores = token_scores(self.policy, minibatch.samples, rows, self.config.sampling.temperature)
        numbers = [number for row in rows for number in row.numbers]
        micro = minibatch.rows(numbers, scores.logprob.shape[1]).to(self.device)
        if self.gap is not None:
            self.gap.add(scores.logprob, micro.sampler, scores.mask)
        return share_of_loss(self.config, scores, micro, totals, sums)

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
            "reference": self.reference_model.learned_state() if self.reference_model else None,
        }

    def restore(self, states: list[Any]) -> None:
        self.policy.load_learned_state(states[0]["policy"])
        self.optimizer.load_state_dict(states[0]["optimizer"])
        self.generator.set_state(states[self.rank % len(states)]["generator"])
        if self.reference_model is not None:
            self.reference_model.load_learned_state(states[0]["reference"])


def _answer_ids(tokenizer: Any, problem: Problem) -> list[int]:
    """What a completion with the reference answer would be: no token that begins a text, and the one that ends it."""
    return [*tokenizer.encode(problem.answer, add_special_tokens=False), tokenizer.eos_token_id]
