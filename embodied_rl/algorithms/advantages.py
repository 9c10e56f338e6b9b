"""Advantages: GAE over time, group-relative advantages over episodes or answers, and their normalisation.

Losses live in `losses.py`. Nothing here carries gradients. Invalid entries are selected away with `where`,
never multiplied by zero, so that a NaN in one reaches nothing. Sums run in float64 and results are float32.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied_rl.algorithms._checks import require_bool, require_same_shape

GroupKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline"]


@torch.no_grad()
def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, equation 16).

    `delta_t = r_t + gamma * V_next_t * (1 - terminated_t) - V_t` and
    `A_t = delta_t + gamma * lam * (1 - done_t) * A_{t+1}` with `done = terminated | truncated`. Termination
    stops the bootstrap, any end stops the trace; where both flags are set the step is a termination.

    Args:
        reward: `[T, N]`.
        value: `[T, N]`, V of the observation acted on.
        next_value: `[T, N]`, V of the next observation; where an episode ended, V of its *final* observation
            and never of the one after the reset.
        terminated: `[T, N]` bool.
        truncated: `[T, N]` bool.
        gamma: discount of one time step.
        lam: decay of the trace.
        valid: `[T, N]` bool, False for steps that did not happen (an env frozen after its end). They get
            advantage 0 and return 0, pass nothing on, and may hold NaN.

    Returns:
        `(advantage, return)`, both float32 `[T, N]`; `return = advantage + value`.

    Raises:
        ValueError: the shapes differ, or a mask is not bool.
    """
    require_same_shape(reward=reward, value=value, next_value=next_value, terminated=terminated, truncated=truncated)
    require_bool(terminated=terminated, truncated=truncated)
    valid = _valid_or_all(valid, reward)
    value = torch.where(valid, value.float(), 0.0)
    bootstrap = torch.where(terminated, 0.0, next_value.float())
    delta = torch.where(valid, reward.float() + gamma * bootstrap - value, 0.0)
    trace_stops = terminated | truncated | ~valid

    advantage = torch.zeros_like(delta)
    following = delta.new_zeros(delta.shape[1:])
    for t in reversed(range(delta.shape[0])):
        following = delta[t] + gamma * lam * torch.where(trace_stops[t], 0.0, following)
        advantage[t] = following
    return advantage, advantage + value


@torch.no_grad()
def chunk_gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """GAE where the policy decides on chunks of actions: over chunks, or over their actions.

    With one value for a chunk, a time step is a chunk and its reward the sum over its valid sub-steps. With a value for
    each action (RLinf-VLA, arXiv 2510.06710), a time step is a sub-step.

    Args:
        reward: `[T, N, C]`.
        value: `[T, N]`, or `[T, N, C]` for a value of each action.
        next_value: `[T, N]`, V of the observation after the chunk (its first action's); where an episode ended within
            the chunk, V of its final observation.
        terminated: `[T, N, C]` bool.
        truncated: `[T, N, C]` bool.
        valid: `[T, N, C]` bool, the sub-steps that were executed.
        gamma: discount of one time step.
        lam: decay of the trace.

    Returns:
        `(advantage, return)` of the shape of `value`; 0 where nothing was executed.

    Raises:
        ValueError: the shapes do not fit, or a mask is not bool.
    """
    require_same_shape(reward=reward, terminated=terminated, truncated=truncated, valid=valid)
    require_bool(terminated=terminated, truncated=truncated, valid=valid)
    if value.shape == reward.shape[:2]:
        reward = torch.where(valid, reward, 0.0).sum(-1)
        terminated, truncated = (valid & terminated).any(-1), (valid & truncated).any(-1)
        return gae(reward, value, next_value, terminated, truncated, gamma, lam, valid.any(-1))
    require_same_shape(value=value, reward=reward)
    following = torch.cat([value[..., 1:], next_value[..., None]], dim=-1)
    following = torch.where(terminated | truncated, next_value[..., None], following)
    steps, envs, actions = reward.shape

    def by_time(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(steps * actions, envs)

    advantage, returns = gae(
        by_time(reward),
        by_time(value),
        by_time(following),
        by_time(terminated),
        by_time(truncated),
        gamma,
        lam,
        by_time(valid),
    )
    advantage, returns = (x.reshape(steps, actions, envs).transpose(1, 2) for x in (advantage, returns))
    return advantage, returns


@torch.no_grad()
def group_advantages(
    score: Tensor,
    group_id: Tensor,
    kind: GroupKind,
    eps: float = 1e-6,
    valid: Tensor | None = None,
) -> Tensor:
    """Advantage of each episode or answer against the others of its group.

    * `grpo` (arXiv 2402.03300, section 4.1.2): `(r - mean_g) / (std_g + eps)`, std unbiased.
    * `dr_grpo` (arXiv 2503.20783): `r - mean_g`.
    * `rloo` (arXiv 2402.14740): `r` minus the mean of the *others* of the group.
    * `reinforce_baseline` (REINFORCE++ with baseline, arXiv 2501.03262): `r - mean_g`, divided by
      `std_batch + eps`. Its mean over the batch is 0 by construction, so that whitening subtracts nothing
      more.

    Args:
        score: `[B]`, one number for each episode or answer.
        group_id: `[B]` integers; the groups may be uneven and in any order.
        kind: one of the four above.
        eps: added to the standard deviation.
        valid: `[B]` bool; invalid entries get 0 and enter no statistic, even when NaN.

    Returns:
        float32 `[B]`. A group of one valid entry, or of equal scores, gets exactly 0.

    Raises:
        ValueError: the shapes differ or are not 1-D, or `kind` is unknown.
    """
    groups = _group(score, group_id, valid)
    # The test is on the scores, not on the rounded std: equal scores must give exactly 0.
    has_signal = groups.valid & ~groups.is_flat[groups.index]
    centred = torch.where(has_signal, groups.score - groups.mean[groups.index], 0.0)
    others = (groups.count - 1).clamp_min(1)
    if kind == "grpo":
        std = (_sum_by_group(centred.square(), groups.index, len(others)) / others).sqrt()
        return (centred / (std + eps)[groups.index]).float()
    if kind == "dr_grpo":
        return centred.float()
    if kind == "rloo":
        return (centred * (groups.count / others)[groups.index]).float()
    if kind == "reinforce_baseline":
        variance = centred.square().sum() / (groups.valid.sum() - 1).clamp_min(1)
        return (centred / (variance.sqrt() + eps)).float()
    raise ValueError(f"kind {kind!r}: expected grpo, dr_grpo, rloo or reinforce_baseline")


@torch.no_grad()
def zero_std_fraction(score: Tensor, group_id: Tensor, valid: Tensor | None = None) -> float:
    """Share of the groups whose valid scores are all equal, and which therefore teach nothing.

    Groups of one count as such; groups without a valid entry are left out; 0.0 when no group is left.

    Args:
        score: `[B]`.
        group_id: `[B]` integers.
        valid: `[B]` bool.
    """
    groups = _group(score, group_id, valid)
    is_present = groups.count > 0
    present = int(is_present.sum())
    return int((groups.is_flat & is_present).sum()) / present if present else 0.0


@torch.no_grad()
def groups_within(success: Tensor, group_id: Tensor, low: float, high: float, valid: Tensor | None = None) -> Tensor:
    """Which entries belong to a group neither too easy nor too hard (dynamic sampling, arXiv 2503.14476).

    Args:
        success: `[B]` bool or numbers.
        group_id: `[B]` integers.
        low: smallest mean success that is kept.
        high: largest mean success that is kept.
        valid: `[B]` bool; invalid entries enter no mean and are not kept.

    Returns:
        bool `[B]`, True where the mean success of the entry's group is in `[low, high]`.
    """
    groups = _group(success, group_id, valid)
    is_kept = (groups.mean >= low) & (groups.mean <= high)
    return is_kept[groups.index] & groups.valid


@torch.no_grad()
def masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, sum and sum of squares of the valid entries: float64 scalars that ranks add up (all-reduce).

    Args:
        x: any shape.
        mask: bool, same shape; masked entries may be NaN.
    """
    require_same_shape(x=x, mask=mask)
    require_bool(mask=mask)
    kept = torch.where(mask, x.double(), 0.0)
    return mask.sum().double(), kept.sum(), kept.square().sum()


def mean_and_std(count: Tensor, total: Tensor, total_squared: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation from the (summed) `masked_moments`; 0 where undefined."""
    mean = total / count.clamp_min(1)
    variance = (total_squared - total * mean) / (count - 1).clamp_min(1)
    return mean, variance.clamp_min(0).sqrt()


@torch.no_grad()
def normalise(
    advantage: Tensor,
    mask: Tensor,
    mean: Tensor | float | None = None,
    std: Tensor | float | None = None,
    eps: float = 1e-8,
) -> Tensor:
    """Advantages with mean 0 and (unbiased) standard deviation 1 over the valid entries.

    Args:
        advantage: any shape.
        mask: bool, same shape; masked entries become 0 and may be NaN.
        mean: statistic over all ranks, from `masked_moments` and `mean_and_std`; that of this tensor when
            None.
        std: likewise; given together with `mean` or not at all.
        eps: added to `std`.

    Returns:
        float32, same shape; 0 for a single valid entry.

    Raises:
        ValueError: the shapes differ, the mask is not bool, or only one of `mean` and `std` is given.
    """
    if mean is None and std is None:
        # In two passes: the squares of large values round away a small spread.
        count, total, _ = masked_moments(advantage, mask)
        centre = total / count.clamp_min(1)
        rest, std = mean_and_std(*masked_moments(advantage.double() - centre, mask))
        mean = centre + rest
    if mean is None or std is None:
        raise ValueError("mean and std go together: give both (the same ranks' statistics) or neither")
    require_same_shape(advantage=advantage, mask=mask)
    require_bool(mask=mask)
    return torch.where(mask, (advantage.double() - mean) / (std + eps), 0.0).float()


@dataclass(frozen=True)
class _Groups:
    score: Tensor  # [B] float64, 0 where invalid
    valid: Tensor  # [B] bool
    index: Tensor  # [B] position of the entry's group in the tensors below
    count: Tensor  # [G] float64, valid entries
    mean: Tensor  # [G] float64
    is_flat: Tensor  # [G] bool, no two valid scores differ


def _group(score: Tensor, group_id: Tensor, valid: Tensor | None) -> _Groups:
    require_same_shape(score=score, group_id=group_id)
    if score.ndim != 1:
        raise ValueError(f"score must be [B], one number for each episode or answer, got {list(score.shape)}")
    valid = _valid_or_all(valid, score)
    kept = torch.where(valid, score.double(), 0.0)
    names, index = torch.unique(group_id, return_inverse=True)
    count = _sum_by_group(valid.double(), index, len(names))
    mean = _sum_by_group(kept, index, len(names)) / count.clamp_min(1)
    highest = _reduce_by_group(torch.where(valid, kept, -torch.inf), index, len(names), "amax")
    lowest = _reduce_by_group(torch.where(valid, kept, torch.inf), index, len(names), "amin")
    return _Groups(kept, valid, index, count, mean, highest <= lowest)


def _sum_by_group(x: Tensor, index: Tensor, groups: int) -> Tensor:
    return x.new_zeros(groups).index_add(0, index, x)


def _reduce_by_group(x: Tensor, index: Tensor, groups: int, how: str) -> Tensor:
    return x.new_zeros(groups).scatter_reduce(0, index, x, how, include_self=False)


def _valid_or_all(valid: Tensor | None, like: Tensor) -> Tensor:
    if valid is None:
        return torch.ones_like(like, dtype=torch.bool)
    require_same_shape(valid=valid, data=like)
    require_bool(valid=valid)
    return valid
