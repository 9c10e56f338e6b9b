"""The mathematics of reinforcement learning as pure functions over tensors: no config, no state, no devices.

Read in the order of an update: `advantages` turns rewards into advantages and returns, `losses` turns
log-probs and values into a loss per element, `reductions` turns that into one number with counts over all
ranks and micro-batches.
"""

from embodied_rl.algorithms.advantages import (
    GroupKind,
    chunk_gae,
    gae,
    group_advantages,
    groups_within,
    masked_moments,
    mean_and_std,
    normalise,
    zero_std_fraction,
)
from embodied_rl.algorithms.losses import (
    MAX_LOG_RATIO,
    KlKind,
    PolicyLoss,
    RatioLevel,
    ValueLossKind,
    cispo_loss,
    importance_weight,
    kl_penalty,
    log_ratio,
    policy_loss,
    value_loss,
)
from embodied_rl.algorithms.reductions import ReductionMode, normaliser, reduce

__all__ = [
    "MAX_LOG_RATIO",
    "GroupKind",
    "KlKind",
    "PolicyLoss",
    "RatioLevel",
    "ReductionMode",
    "ValueLossKind",
    "chunk_gae",
    "cispo_loss",
    "gae",
    "group_advantages",
    "groups_within",
    "importance_weight",
    "kl_penalty",
    "log_ratio",
    "masked_moments",
    "mean_and_std",
    "normalise",
    "normaliser",
    "policy_loss",
    "reduce",
    "value_loss",
    "zero_std_fraction",
]
