"""The typed configuration of a reasoning run: every key, its type, its range and its default.

A recipe (`recipes/*.yaml`) is a short layer over these defaults. Reading recipes lives in `recipe.py`. This module
imports nothing heavy: a dry run depends on it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from embodied_rl.config import (
    ClusterConfig,
    Fraction,
    NonNegative,
    Positive,
    RunName,
    Section,
    TrackingConfig,
)

AboveZero = Annotated[float, Field(gt=0)]


class ModelConfig(Section):
    path: str = Field(
        default="smollm2-135m-instruct", min_length=1, description="directory in the Hugging Face format, or a preset"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the arithmetic; parameters that are trained stay float32"
    )
    lora_rank: Positive | None = Field(default=None, description="of adapters, trained in place of the network")
    lora_alpha: Positive = Field(default=32, description="adapters count alpha / rank")
    gradient_checkpointing: bool = Field(default=False, description="recompute activations in the backward pass")


class DataConfig(Section):
    """Problems: a file, or generated ones (`arithmetic:1` to `arithmetic:5`, `algebra:1` to `algebra:3`)."""

    train: str = Field(default="arithmetic:1", min_length=1, description="file (.jsonl, .parquet) or generated set")
    test: str = Field(default="arithmetic:1", min_length=1, description="held-out file or generated set")
    format: Literal["plain", "gsm8k", "math", "aime", "gpqa"] = Field(default="plain", description="of the files")
    prompt_column: str = Field(default="prompt", description="plain: a text, or a list of chat messages")
    answer_column: str = "answer"
    instruction: str = Field(default="", description="added to each problem on a line of its own")
    train_size: Positive = Field(default=20_000, description="problems of a generated training set")
    test_size: Positive = Field(default=200, description="held-out problems that are used")
    max_prompt_tokens: Positive = Field(default=512, description="longer prompts are left out")
    skip_bad_lines: bool = Field(default=False, description="count lines that are not understood, instead of failing")


class SamplingConfig(Section):
    prompts: Positive = Field(default=16, description="problems in one iteration")
    group_size: Annotated[int, Field(ge=2)] = Field(default=8, description="completions of each problem")
    temperature: AboveZero = 1.0
    max_new_tokens: Positive = 16
    max_rows: Positive = Field(default=128, description="completions that a sampler works on at once")
    engine: Literal["transformers", "vllm"] = Field(default="transformers", description="vllm: on GPUs, if installed")
    ahead: Annotated[int, Field(ge=0, le=1)] = Field(
        default=0,
        description="1: the next iteration's completions are sampled while this one's are learned from, so that their "
        "model is one update old (asynchronous); algorithm.importance_cap corrects for it",
    )


class RewardConfig(Section):
    """The reward of a completion is the weighted sum of its functions, plus the overlong penalty."""

    functions: dict[str, float] = Field(
        default={"accuracy": 1.0}, min_length=1, description="accuracy, format, or package.module:function -> weight"
    )
    overlong_buffer: Annotated[int, Field(ge=0)] = Field(
        default=0, description="last tokens before max_new_tokens over which the penalty grows (DAPO)"
    )
    overlong_penalty: NonNegative = 1.0
    processes: Positive = Field(default=1, description="that compare answers")
    timeout_s: AboveZero = Field(default=5.0, description="processor seconds for one comparison")


class AlgorithmConfig(Section):
    """The name sets the defaults of keys that are null (`PRESETS` below); each can be overridden."""

    name: Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce", "gspo", "cispo", "ppo"] = "grpo"
    lr: AboveZero = 1e-6
    lr_schedule: Literal["constant", "linear"] = "constant"
    weight_decay: NonNegative = 0.0
    epochs: Positive = Field(default=1, description="passes over each iteration's samples")
    minibatches: Positive = Field(default=1, description="optimiser steps in each pass")
    token_budget: Positive = Field(default=4096, description="padded tokens in one forward pass")
    elastic: bool = Field(
        default=False, description="learn from finished groups while others are being sampled; one update an iteration"
    )
    group_advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline"] | None = None
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum-constant"] | None = None
    ratio_level: Literal["token", "sequence"] | None = None
    loss: Literal["clip", "cispo"] | None = None
    clip_low: AboveZero | None = None
    clip_high: AboveZero | None = None
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    drop_flat_groups: bool | None = Field(
        default=None,
        description="dynamic sampling: groups of equal accuracy (rewards, where it is not paid) are left out",
    )
    refill: Annotated[int, Field(ge=0)] = Field(
        default=0, description="rounds at most in which other problems are sampled in place of groups left out"
    )
    kl: Literal["k1", "k2", "k3"] = Field(default="k3", description="estimator of the divergence from the reference")
    kl_coef: NonNegative = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    importance_cap: AboveZero | None = Field(
        default=2.0, description="truncated importance weight of sampler against trainer; null: none"
    )
    max_grad_norm: AboveZero = 1.0
    gamma: Fraction = Field(default=1.0, description="ppo: discount per token")
    lam: Fraction = Field(default=0.95, description="ppo: lambda of the advantages")
    value_lr: AboveZero = Field(default=1e-5, description="ppo: of the critic")
    value_coef: NonNegative = Field(default=0.1, description="ppo: weight of the critic's loss")
    value_clip: AboveZero | None = Field(default=0.2, description="ppo: how far a value may move in an update")


class TrainConfig(Section):
    iterations: Positive = 100
    warm_start: Annotated[int, Field(ge=0)] = Field(
        default=0, description="optimiser steps on reference answers before the first iteration"
    )
    warm_start_batch: Positive = 64
    warm_start_lr: AboveZero = 1e-3
    checkpoint_every: Positive = Field(default=10, description="iterations; the last iteration is always saved")
    keep_checkpoints: Positive = 2


class EvaluationConfig(Section):
    every: Annotated[int, Field(ge=0)] = Field(default=10, description="iterations; 0: only before and after")
    problems: Positive = Field(default=200, description="held-out problems of an evaluation")
    completions: Annotated[int, Field(ge=0)] = Field(default=4, description="completions shown in each table")


class MathConfig(Section):
    """One run. See `reasoning/recipes/` for examples."""

    name: RunName | None = Field(default=None, description="run directory under run_root; default: the recipe's name")
    run_root: str = Field(default="runs", min_length=1, description="directory that holds the runs")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    placement: str = Field(default="sampler, judge, actor: all", description="devices of each worker group, or auto")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig(project="embodied-rl-math")
    cluster: ClusterConfig = ClusterConfig()


PRESETS: dict[str, dict[str, object]] = {
    # GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476), RLOO (2402.14740), REINFORCE++ with baseline
    # (2501.03262), GSPO (2507.18071, its clip range), CISPO (2506.13585), PPO with a critic (1707.06347).
    "grpo": {"group_advantage": "grpo", "aggregation": "sequence-mean"},
    "dr_grpo": {"group_advantage": "dr_grpo", "aggregation": "sequence-sum-constant"},
    "dapo": {"group_advantage": "grpo", "aggregation": "token-mean", "clip_high": 0.28, "drop_flat_groups": True},
    "rloo": {"group_advantage": "rloo", "aggregation": "token-mean"},
    "reinforce": {"group_advantage": "reinforce_baseline", "aggregation": "token-mean"},
    "gspo": {
        "group_advantage": "grpo",
        "aggregation": "sequence-mean",
        "ratio_level": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    "cispo": {"group_advantage": "grpo", "aggregation": "token-mean", "loss": "cispo", "clip_low": 1.0},
    "ppo": {"aggregation": "token-mean"},
}
COMMON: dict[str, object] = {
    "ratio_level": "token",
    "loss": "clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "drop_flat_groups": False,
}


def with_preset(config: MathConfig) -> MathConfig:
    """The configuration with the keys that its algorithm's name decides filled in, where they were not given."""
    preset = {**COMMON, **PRESETS[config.algorithm.name]}
    chosen = {key: value for key, value in preset.items() if getattr(config.algorithm, key) is None}
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update=chosen)})
