"""The loss of a micro-batch of completions, as its share of the loss of the whole batch over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl import algorithms as rl
from embodied_rl.sums import Sums
from reasoning.batch import Batch
from reasoning.config import MathConfig
from reasoning.packing import Scores

# Metrics by the denominator that they are a mean over.
MEAN_OVER = {
    "losses/policy": "policy",
    "losses/approx_kl": "elements",
    "losses/clip_fraction": "elements",
    "sampling/importance_weight": "elements",
    "losses/entropy": "tokens",
    "losses/kl": "tokens",
    "losses/value": "tokens",
    "losses/value_clip_fraction": "tokens",
}


def denominators(config: MathConfig, batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """What the terms of a batch are divided by, each a float32 scalar; those of all ranks add up.

    policy: by `aggregation`, at the level of the ratio. elements: of that level. kl: by `aggregation`, of tokens.
    tokens: of the completions.
    """
    algorithm = config.algorithm
    mask, mode = batch.mask, algorithm.aggregation or "token-mean"
    tokens, sequences = mask.sum().float(), torch.tensor(float(len(mask)))
    is_by_token = algorithm.ratio_level == "token"
    by_token = rl.normaliser(mask, mode, config.sampling.max_new_tokens)
    counts = {
        "policy": by_token if is_by_token else rl.normaliser(mask.any(1), mode, 1),
        "elements": tokens if is_by_token else sequences,
        "kl": by_token,
        "tokens": tokens,
    }
    return {name: count.to(device) for name, count in counts.items()}


def share_of_loss(config: MathConfig, scores: Scores, micro: Batch, totals: dict[str, Tensor], sums: Sums) -> Tensor:
    """Policy, divergence and value terms of some completions, a scalar; notes their metrics in `sums`.

    Args:
        scores: of the model that learns, [S, L].
        micro: the same completions, cut to L, on the device of the scores.
        totals: the `denominators` of the whole batch of all ranks, on that device.
    """
    algorithm = config.algorithm
    mode, level = algorithm.aggregation or "token-mean", algorithm.ratio_level or "token"
    logprob, mask = scores.logprob, scores.mask
    old = logprob.detach() if micro.old is None else micro.old

    def note(name: str, x: Tensor) -> None:
        sums.add_part(name, x.sum() / totals[MEAN_OVER[name]])

    ratio, valid = rl.log_ratio(logprob[..., None], old[..., None], mask, level)
    ratio, valid = (x.squeeze(-1) if level == "token" else x for x in (ratio, valid))
    clip_low, clip_high = algorithm.clip_low or 0.2, algorithm.clip_high or 0.2
    if algorithm.loss == "cispo":
        policy = rl.cispo_loss(ratio, logprob, micro.advantage, valid, clip_low, clip_high)
    else:
        policy = rl.policy_loss(ratio, micro.advantage, valid, clip_low, clip_high, algorithm.dual_clip)
    per_element = policy.loss
    if algorithm.importance_cap is not None:
        gap, _ = rl.log_ratio(old[..., None], micro.sampler[..., None], mask, level)
        gap = gap.squeeze(-1) if level == "token" else gap
        weight = rl.importance_weight(gap, torch.zeros_like(gap), algorithm.importance_cap, valid)
        per_element = per_element * weight
        note("sampling/importance_weight", weight)
    loss = policy_part = rl.reduce(per_element, valid, mode, totals["policy"])
    if micro.reference is not None:
        kl = rl.kl_penalty(logprob, micro.reference, algorithm.kl, mask)
        note("losses/kl", kl)
        if algorithm.kl_in == "loss":
            loss = loss + algorithm.kl_coef * rl.reduce(kl, mask, mode, totals["kl"])
    if scores.value is not None and micro.value is not None and micro.returns is not None:
        error, clipped = rl.value_loss(scores.value, micro.value, micro.returns, algorithm.value_clip, "mse", mask=mask)
        loss = loss + algorithm.value_coef * error.sum() / totals["tokens"]
        note("losses/value", error)
        note("losses/value_clip_fraction", clipped.float())
    sums.add_part("losses/policy", policy_part)
    note("losses/entropy", scores.entropy)
    note("losses/approx_kl", policy.approx_kl)
    note("losses/clip_fraction", policy.clipped.float())
    return loss
