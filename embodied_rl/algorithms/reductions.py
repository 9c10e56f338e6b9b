"""From a loss per element to one number, with global counts.

The denominator is taken once for the whole update, over all micro-batches and ranks (`normaliser`, added up),
and each micro-batch contributes its part of the numerator (`reduce`). The sum of the parts does not depend on
how the sequences were cut into micro-batches or ranks, nor do the accumulated gradients.

The leading dimension is the sequence, all others are its tokens; a 1-D tensor holds sequences of one token. A
time-major batch `[T, N, ...]` is brought into this form by the caller. A sequence is never split by a cut,
and one without a valid token counts nowhere.
"""

from typing import Literal

import torch
from torch import Tensor

from embodied_rl.algorithms._checks import require_bool, require_same_shape

ReductionMode = Literal["token-mean", "sequence-mean", "sequence-sum-constant"]


def normaliser(mask: Tensor, mode: ReductionMode, max_length: int | None = None) -> Tensor:
    """This micro-batch's share of the denominator.

    Its sum over micro-batches and ranks is the `total` of `reduce`.

    * `token-mean` (DAPO, arXiv 2503.14476, equation 8): the number of valid tokens.
    * `sequence-mean` (GRPO, arXiv 2402.03300, equation 3): the number of sequences with a valid token.
    * `sequence-sum-constant` (Dr. GRPO, arXiv 2503.20783): that number times `max_length`.

    Args:
        mask: `[S, ...]` bool.
        mode: see above.
        max_length: tokens of the longest possible sequence; for `sequence-sum-constant` only.

    Returns:
        float32 scalar.

    Raises:
        ValueError: the mask is not bool or has no dimension, `mode` is unknown, or `max_length` is missing or
        below 1.
    """
    mask = _by_sequence(mask)
    if mode == "token-mean":
        return mask.sum().float()
    sequences = mask.any(1).sum().float()
    if mode == "sequence-mean":
        return sequences
    if mode == "sequence-sum-constant":
        if max_length is None or max_length < 1:
            raise ValueError(f"sequence-sum-constant needs a max_length of at least 1, got {max_length}")
        return sequences * max_length
    raise ValueError(f"mode {mode!r}: expected token-mean, sequence-mean or sequence-sum-constant")


def reduce(x: Tensor, mask: Tensor, mode: ReductionMode, total: Tensor) -> Tensor:
    """This micro-batch's part of the reduced loss or metric: its numerator over the global `total`.

    The numerator is the sum over valid tokens, for `sequence-mean` the sum over sequences of their token
    mean.

    Args:
        x: `[S, ...]`, differentiable; masked entries may be NaN.
        mask: bool, same shape.
        mode: the mode given to `normaliser`.
        total: scalar, the sum of `normaliser` over all micro-batches and ranks. It may have been scaled (by
            the number of ranks, where gradients are averaged instead of summed).

    Returns:
        float32 scalar; 0 with zero gradients when nothing is valid anywhere.

    Raises:
        ValueError: the shapes differ, the mask is not bool or has no dimension, or `mode` is unknown.
    """
    require_same_shape(x=x, mask=mask)
    mask = _by_sequence(mask)
    kept = torch.where(mask, x.float().reshape(mask.shape), 0.0)
    if mode == "sequence-mean":
        numerator = (kept.sum(1) / mask.sum(1).clamp_min(1)).sum()
    elif mode in ("token-mean", "sequence-sum-constant"):
        numerator = kept.sum()
    else:
        raise ValueError(f"mode {mode!r}: expected token-mean, sequence-mean or sequence-sum-constant")
    return numerator / torch.where(total > 0, total, 1.0).float()


def _by_sequence(mask: Tensor) -> Tensor:
    require_bool(mask=mask)
    if mask.ndim == 0:
        raise ValueError("mask must have a leading sequence dimension, got a scalar")
    return mask.unsqueeze(-1).flatten(1)
