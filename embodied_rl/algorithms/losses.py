"""Losses per element, before any mean: policy, value, KL penalty, and the ratios they are made of.

Nothing here reduces over a batch: `reductions.py` does, with global counts. Shapes follow the design's
legend: `C` actions per chunk, `A` dimensions or tokens per action; leading dimensions are free. Each function
that takes a mask returns 0 (False for flags) where it is False and lets no NaN from there reach a value or a
gradient. All results are float32.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from embodied_rl.algorithms._checks import require_bool, require_same_shape

RatioLevel = Literal["token", "action", "chunk", "sequence"]
ValueLossKind = Literal["mse", "huber"]
KlKind = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +-20, so that `exp` stays below 4.9e8; beyond the bound the gradient is 0."""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss per element, all three tensors of the mask's shape."""

    loss: Tensor
    """float32, carries the gradient; 0 where masked."""
    clipped: Tensor
    """bool, the ratio lies outside the clip range; False where masked."""
    approx_kl: Tensor
    """float32, detached, `(ratio - 1) - log ratio`, which estimates KL(old || new); 0 where masked."""


def log_ratio(logprob: Tensor, old_logprob: Tensor, mask: Tensor, level: RatioLevel) -> tuple[Tensor, Tensor]:
    """Log of the probability ratio of the new to the old policy, at the level at which it is clipped.

    * `token`: each entry by itself, `[..., C, A]` (PPO on tokens).
    * `action`: sum over the `A` entries of an action, `[..., C]`.
    * `chunk`: sum over the valid actions of a chunk, `[...]`.
    * `sequence`: mean over the valid tokens, `[...]` (GSPO, arXiv 2507.18071, equation 7). The mean keeps a
      long answer from overflowing.

    Args:
        logprob: `[..., C, A]`, differentiable.
        old_logprob: `[..., C, A]`, taken as constant.
        mask: `[..., C]` bool, the valid sub-steps; it holds for all `A` entries of one.
        level: see above.

    Returns:
        `(log ratio, mask)` at that level, the log ratio clamped to +-`MAX_LOG_RATIO`. A chunk or sequence is
        valid when any of its sub-steps is.

    Raises:
        ValueError: the shapes do not fit (`[B, 1]` beside `[B, 7]`), the mask is not bool, or `level` is
        unknown.
    """
    require_same_shape(logprob=logprob, old_logprob=old_logprob)
    require_bool(mask=mask)
    if logprob.ndim < 2 or mask.shape != logprob.shape[:-1]:
        raise ValueError(
            f"expected logprob [..., C, A] and mask [..., C], got {list(logprob.shape)} and {list(mask.shape)}"
        )
    token_mask = mask.unsqueeze(-1).expand_as(logprob)
    difference = torch.where(token_mask, _log_of_ratio(logprob, old_logprob.detach()), 0.0)
    if level == "token":
        return _clamp_log(difference), token_mask
    if level == "action":
        return _clamp_log(difference.sum(-1)), mask
    if level == "chunk":
        return _clamp_log(difference.sum((-2, -1))), mask.any(-1)
    if level == "sequence":
        tokens = token_mask.sum((-2, -1)).clamp_min(1)
        return _clamp_log(difference.sum((-2, -1)) / tokens), mask.any(-1)
    raise ValueError(f"level {level!r}: expected token, action, chunk or sequence")


def policy_loss(
    log_ratio: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Clipped surrogate `-min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)`, dual clip optional.

    PPO, arXiv 1707.06347, equation 7; separate bounds: DAPO, arXiv 2503.14476, equation 8; dual clip: arXiv
    1912.09729.

    Args:
        log_ratio: any level's shape, from `log_ratio`.
        advantage: that shape, or its leading dimensions only (one advantage for all that follows); taken as
            constant.
        mask: bool, the shape of `log_ratio`.
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
        dual_clip: above 1; where `A < 0` the loss is at most `dual_clip * |A|`.

    Raises:
        ValueError: the shapes do not fit, the mask is not bool, or `dual_clip` is not above 1.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    log_ratio, advantage = _masked_inputs(log_ratio, advantage, mask)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    if dual_clip is not None:
        # Only a negative advantage gives a loss above 0, so that the bound touches no other.
        loss = torch.minimum(loss, dual_clip * advantage.abs())
    return _policy_loss(loss, log_ratio, clip_low, clip_high)


def cispo_loss(
    log_ratio: Tensor,
    logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """CISPO `-sg(clip(rho, 1 - clip_low, 1 + clip_high)) * A * logprob` (arXiv 2506.13585).

    The weight is clipped, not the update: every valid element keeps a gradient. The paper leaves the lower
    side open (`clip_low = 1`).

    Args:
        log_ratio: any level's shape, from `log_ratio`; taken as constant.
        logprob: that shape, differentiable.
        advantage: that shape, or its leading dimensions only; taken as constant.
        mask: bool, that shape.
        clip_low: distance of the weight's lower bound from 1.
        clip_high: distance of the weight's upper bound from 1.

    Raises:
        ValueError: the shapes do not fit, or the mask is not bool.
    """
    require_same_shape(log_ratio=log_ratio, logprob=logprob)
    log_ratio, advantage = _masked_inputs(log_ratio.detach(), advantage, mask)
    weight = log_ratio.exp().clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * advantage * torch.where(mask, logprob.float(), 0.0)
    return _policy_loss(loss, log_ratio, clip_low, clip_high)


@torch.no_grad()
def importance_weight(logprob_old: Tensor, logprob_sampler: Tensor, cap: float, mask: Tensor | None = None) -> Tensor:
    """Truncated importance weight `min(exp(logprob_old - logprob_sampler), cap)`.

    It multiplies the loss per element where the sampler was not exactly the trainer's old policy: another
    engine's arithmetic, or stale weights (decoupled PPO, arXiv 2505.24298).

    Args:
        logprob_old: any shape, under the trainer's policy before the update (the proximal policy).
        logprob_sampler: same shape, as recorded when sampling.
        cap: largest weight, above 0.
        mask: bool, same shape; 0 where False.

    Returns:
        float32, same shape, without gradient.

    Raises:
        ValueError: the shapes differ, the mask is not bool, or `cap` is not above 0.
    """
    if cap <= 0:
        raise ValueError(f"cap must be above 0, got {cap}")
    require_same_shape(logprob_old=logprob_old, logprob_sampler=logprob_sampler)
    weight = _clamp_log(_log_of_ratio(logprob_old, logprob_sampler)).exp().clamp_max(cap)
    return _zero_where_masked(weight, mask)


def value_loss(
    value: Tensor,
    old_value: Tensor,
    returns: Tensor,
    clip: float | None,
    kind: ValueLossKind,
    huber_delta: float = 10.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss of the critic: `0.5 * error^2`, or Huber with the same curvature at 0.

    With `clip` it is the larger of the losses of `value` and of `old_value + clamp(value - old_value, -clip,
    clip)` (the PPO code of OpenAI baselines).

    Args:
        value: any shape, differentiable.
        old_value: same shape, taken as constant.
        returns: same shape, taken as constant.
        clip: how far the value may move; None leaves it free.
        kind: `mse` or `huber`.
        huber_delta: the error from which Huber is linear.
        mask: bool, same shape; 0 and False where False.

    Returns:
        `(loss, clipped)`, the loss float32 per element, and bool where `value` moved further than `clip`.

    Raises:
        ValueError: the shapes differ, the mask is not bool, or `kind` is unknown.
    """
    require_same_shape(value=value, old_value=old_value, returns=returns)
    value = _zero_where_masked(value.float(), mask)
    old_value = _zero_where_masked(old_value.detach().float(), mask)
    returns = _zero_where_masked(returns.detach().float(), mask)
    loss = _regression_loss(value, returns, kind, huber_delta)
    if clip is None:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    change = value - old_value
    bounded = old_value + change.clamp(-clip, clip)
    return torch.maximum(loss, _regression_loss(bounded, returns, kind, huber_delta)), change.abs() > clip


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kind: KlKind, mask: Tensor | None = None) -> Tensor:
    """Estimate per element of KL(policy || reference) from samples of the policy.

    With `d = ref_logprob - logprob`, clamped to +-`MAX_LOG_RATIO`: k1 `-d`, k2 `d^2 / 2`, and k3
    `exp(d) - 1 - d`, which is never negative (Schulman, "Approximating KL divergence"; k3 is equation 4 of
    GRPO, arXiv 2402.03300).

    Args:
        logprob: any shape, differentiable.
        ref_logprob: same shape, taken as constant.
        kind: `k1`, `k2` or `k3`.
        mask: bool, same shape; 0 where False.

    Returns:
        float32, same shape.

    Raises:
        ValueError: the shapes differ, the mask is not bool, or `kind` is unknown.
    """
    require_same_shape(logprob=logprob, ref_logprob=ref_logprob)
    d = _clamp_log(_zero_where_masked(_log_of_ratio(ref_logprob.detach(), logprob), mask))
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return _exp_minus_linear(d)
    raise ValueError(f"kind {kind!r}: expected k1, k2 or k3")


def _log_of_ratio(logprob: Tensor, other: Tensor) -> Tensor:
    """Their difference; 0 without gradient where both policies give probability 0, so that neither is preferred."""
    both_zero = torch.isneginf(logprob) & torch.isneginf(other)
    return torch.where(both_zero, 0.0, logprob.float() - other.float())


def _masked_inputs(log_ratio: Tensor, advantage: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    require_same_shape(log_ratio=log_ratio, mask=mask)
    require_bool(mask=mask)
    leading = tuple(mask.shape[: advantage.ndim])
    if tuple(advantage.shape) != leading or (advantage.ndim == 0 and mask.ndim > 0):
        raise ValueError(
            f"advantage must have the shape {list(mask.shape)} of the log ratio or its leading dimensions, "
            f"got {list(advantage.shape)}"
        )
    expanded = advantage.detach().float().reshape(leading + (1,) * (mask.ndim - advantage.ndim))
    return torch.where(mask, log_ratio.float(), 0.0), torch.where(mask, expanded, 0.0)


def _policy_loss(loss: Tensor, log_ratio: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    # The log ratio is 0 where masked: not clipped, and no divergence.
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()
    clipped = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    return PolicyLoss(loss, clipped, _exp_minus_linear(log_ratio))


def _regression_loss(value: Tensor, target: Tensor, kind: ValueLossKind, huber_delta: float) -> Tensor:
    if kind == "mse":
        return 0.5 * (value - target).square()
    if kind == "huber":
        return functional.huber_loss(value, target, reduction="none", delta=huber_delta)
    raise ValueError(f"kind {kind!r}: expected mse or huber")


def _exp_minus_linear(x: Tensor) -> Tensor:
    # expm1 keeps the digits that exp(x) - 1 loses near 0. On a CPU it never rounds below x (tried for
    # every float32 of size 1e-8 to 20); CUDA does not promise the last bit, hence the clamp.
    return (torch.expm1(x) - x).clamp_min(0.0)


def _clamp_log(x: Tensor) -> Tensor:
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _zero_where_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return x
    require_same_shape(data=x, mask=mask)
    require_bool(mask=mask)
    return torch.where(mask, x, 0.0)
