"""The typed configuration of a run: every key, its type, its range and its default.

A recipe (`recipes/*.yaml`) is a short layer over these defaults. Reading recipes and overrides lives in
`recipe.py`; checks that need the machine (simulator installed, assets there) live in `preflight.py`.
This module imports nothing heavy: `--dry-run` depends on it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
RunName = Annotated[
    str,
    Field(
        pattern=r"^\w[\w.+-]*$",
        max_length=100,
        json_schema_extra={"expected": "one directory name of letters, digits and . _ + -, without path separators"},
    ),
]


class Section(BaseModel):
    """A group of keys. Unknown keys are errors: nothing is ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


OwnKind = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:\w+$", json_schema_extra={"expected": "module:Class"})]
EnvKind = Literal["maniskill", "libero", "gymnasium"] | OwnKind
# Up to 65535: libzmq takes a greater one for another.
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
Address = Annotated[str, Field(pattern=f"^(ipc://.+|tcp://.+:{_PORT})$")]


def _several(given: Any) -> Any:
    """One as well as a list of some."""
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given


Addresses = Annotated[tuple[Address, ...], BeforeValidator(_several)]


class EnvShare(Section):
    """One env of a mix. What is not given is that of `env`."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    kind: EnvKind | None = None
    id: str | None = None
    server: Addresses | None = None
    server_token_file: str | None = None
    python: str | None = None
    horizon: Positive | None = None
    instruction: str | None = None
    reward_scale: float | None = None
    success_bonus: float | None = None
    fixed_actions: dict[int, float] | None = None
    control_mode: str | None = None
    reward_mode: Literal["normalized_dense", "dense", "sparse", "none"] | None = None
    sim_freq: Positive | None = None
    control_freq: Positive | None = None
    init_states: Literal["sampled", "stored"] | None = None


class EnvConfig(Section):
    """What is simulated. Steps are env steps (sub-steps of a chunk)."""

    kind: EnvKind = "maniskill"
    id: str = "PushCube-v1"
    num_envs: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    processes: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="env processes on a CPU; default: one for each CPU slot of the env placement",
    )
    horizon: Positive | None = Field(
        default=None, description="env steps after which an episode is truncated; default: the env's own"
    )
    observation: tuple[Literal["state", "image"], ...] = Field(default=("state",), min_length=1)
    instruction: str | None = Field(default=None, description="language instruction; default: the task's own")
    reward_scale: float = 1.0
    success_bonus: float = Field(
        default=0.0, description="added to the reward of a step that ends in success, before scaling"
    )
    ignore_terminations: bool = Field(
        default=False, description="keep stepping after success or failure, until the horizon"
    )
    success: Literal["once", "at_end"] = Field(
        default="once", description="which success is evaluated and compared: at any time in an episode, or at its end"
    )
    fixed_actions: dict[int, float] = Field(
        default_factory=dict,
        description="action dimension -> value it is held at; the policy does not see it",
    )
    control_mode: str | None = Field(default=None, description="ManiSkill controller; default: the env's own")
    reward_mode: Literal["normalized_dense", "dense", "sparse", "none"] = Field(
        default="normalized_dense", description="ManiSkill"
    )
    sim_freq: Positive | None = Field(default=None, description="ManiSkill physics rate, Hz")
    control_freq: Positive | None = Field(default=None, description="ManiSkill control rate, Hz")
    sim_backend: Literal["auto", "cpu", "gpu"] = Field(
        default="auto", description="ManiSkill; auto takes a GPU where there is one"
    )
    init_states: Literal["sampled", "stored"] = Field(
        default="sampled", description="LIBERO; stored: the initial states that published evaluations use too"
    )
    held_out_init_states: Annotated[int, Field(ge=0, lt=50)] = Field(
        default=0,
        description="LIBERO; stored initial states of each task that evaluations begin from, and training never",
    )
    cameras: Annotated[int, Field(ge=1, le=2)] = Field(
        default=2, description="LIBERO; 1: images of the table alone, which take half as long; 2: and of the wrist"
    )
    image_size: Annotated[int, Field(ge=16, le=1024)] = Field(
        default=128, description="pixels, square; ManiSkill's scenes on the Bridge table have 640 x 480"
    )
    shader: Literal["minimal", "default"] = Field(default="minimal", description="ManiSkill camera shader")
    object_set: Literal["train", "test", "all"] = Field(
        default="train", description="put-on-plate scenes: which objects, tables or whatever the scene varies"
    )
    mesh_detail: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="ManiSkill, metres: vertices of untextured meshes that are as close become one, and a CPU draws "
        "small pictures several times as fast; default: full detail",
    )
    step_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=120.0, description="an env process silent for longer is replaced"
    )
    server: Addresses = Field(
        default=(),
        description="simulate on env servers (`embodied-rl serve-env`), each with an equal share of the envs",
        json_schema_extra={"expected": "an address such as tcp://127.0.0.1:5005 (ports end at 65535), or a list"},
    )
    server_token_file: str | None = Field(default=None, description="file with the token that the servers ask for")
    server_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=60.0, description="an env server silent for longer ends the run"
    )
    python: str | None = Field(
        default=None, description="interpreter of another virtual environment to simulate in; default: this one"
    )
    mix: tuple[EnvShare, ...] = Field(
        default=(),
        description="several envs sampled by weight; each has keys of `env`, which hold where it has none",
        json_schema_extra={"expected": "a list such as [{id: PushCube-v1, weight: 2}, {id: PullCube-v1}]"},
    )

    @property
    def score(self) -> str:
        """Name of the success that counts, in records and metrics."""
        return f"success_{self.success}"


class OpenVLAConfig(Section):
    """How a checkpoint is used; see `policies.openvla.OpenVLASettings`."""

    checkpoint: str = Field(
        default="openvla-tiny", min_length=1, description="directory in the published format, or a preset"
    )
    unnorm_key: str | None = Field(
        default=None, description="data set whose action statistics apply; default: the checkpoint's only one"
    )
    epsilon: NonNegative = Field(default=0.0, description="added to the range of an action dimension")
    gripper: Literal["as_trained", "libero", "maniskill"] = Field(
        default="as_trained", description="how the last action dimension is commanded"
    )
    tokenizer: str | None = Field(default=None, description="directory with tokenizer.json; default: the checkpoint's")
    prompt: Literal["openvla", "openvla-v01"] = "openvla"
    prompt_length: Positive = Field(default=64, description="tokens that prompts are filled up to")
    lanczos: bool = Field(default=False, description="resize images by TensorFlow's Lanczos filter first")
    center_crop: bool = Field(default=False, description="show the middle 90 % of the image")
    view: Annotated[int, Field(ge=0)] = Field(default=0, description="which camera is shown")
    dtype: Literal["float32", "bfloat16"] | None = Field(default=None, description="of the network; default: as stored")
    attention: Literal["sdpa", "eager"] = "sdpa"
    gradient_checkpointing: bool = Field(default=False, description="recompute activations in the backward pass")
    compile: str | None = Field(default=None, description="backend of torch.compile, such as inductor; default: none")
    temperature: Annotated[float, Field(gt=0)] = Field(default=1.0, description="of sampling and of log-probabilities")
    top_k: Positive | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    value_position: Literal["first", "last", "mean"] = Field(default="first", description="hidden state that is valued")
    value_hidden: tuple[Positive, ...] = (512, 128)
    value_detached: bool = Field(default=False, description="what the critic learns does not move the rest")
    value_of_state: bool = Field(
        default=False, description="the critic reads the state of the env, which the policy does not see"
    )
    lora_rank: Positive | None = Field(default=None, description="of adapters, trained in place of the network")
    lora_alpha: Annotated[float, Field(gt=0)] = Field(default=16.0, description="adapters count alpha / rank")
    lora_targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="names of modules, or their last parts",
    )
    adapter: str | None = Field(default=None, description="directory of a stored adapter to go on from")
    frozen: tuple[Literal["vision_backbone", "projector", "language_model"], ...] = Field(
        default=(), description="parts that are not trained"
    )
    reuse_features: bool = Field(
        default=False, description="learn from what the frozen vision towers saw while acting, in place of pictures"
    )


class OpenVLAOFTConfig(OpenVLAConfig):
    """The same, and what a checkpoint of OpenVLA-OFT does not tell; see `policies.openvla_oft.OpenVLAOFTSettings`."""

    checkpoint: str = Field(
        default="openvla-oft-tiny", min_length=1, description="directory in the published format, or a preset"
    )
    epsilon: NonNegative = Field(default=1e-8, description="added to the range of an action dimension")
    layout: Literal["official", "simplevla", "rlinf"] = Field(
        default="official", description="of the sequence that the checkpoint was trained with"
    )
    head: Literal["tokens", "l1"] = Field(default="tokens", description="l1 can be evaluated, and not trained")
    more_views: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="cameras shown after `view`, such as the wrist's"
    )
    proprioception: bool = Field(default=False, description="read the state of the robot")
    film: bool = Field(default=False, description="the instruction modulates the vision towers")
    bounds: Literal["quantiles", "extremes"] = Field(
        default="quantiles", description="statistics of actions that are -1 and 1"
    )
    value_of: Literal["chunk", "action"] = Field(default="chunk", description="what one value is of")


class PolicyConfig(Section):
    kind: Literal["mlp", "cnn", "openvla", "openvla_oft"] = Field(
        default="mlp",
        description="mlp: of the state; cnn: of images, and the state; openvla: of images and language; openvla_oft: "
        "the same, several actions at once",
    )
    hidden: tuple[Annotated[int, Field(ge=1, le=65536)], ...] = (128, 128)
    chunk: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=1, description="consecutive actions from one policy call"
    )
    log_std: Annotated[float, Field(ge=-5, le=2)] = Field(
        default=-0.5, description="initial log standard deviation of actions"
    )
    normalise_observations: bool = True
    observation_clip: Annotated[float, Field(gt=0)] = 8.0
    openvla: OpenVLAConfig = OpenVLAConfig()
    openvla_oft: OpenVLAOFTConfig = OpenVLAOFTConfig()

    @property
    def vla(self) -> OpenVLAConfig | None:
        """The options of a policy with action tokens; None for another kind."""
        return {"openvla": self.openvla, "openvla_oft": self.openvla_oft}.get(self.kind)


class RolloutConfig(Section):
    steps: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=36, description="env steps of each env in one iteration; chunk steps times chunk length"
    )
    epochs: Positive = Field(default=1, description="rollouts that make the batch of one iteration")
    pipeline_stages: Annotated[int, Field(ge=1, le=1000)] | Literal["auto"] = Field(
        default=2,
        description="groups of envs: one steps while another is inferred; auto: planned, with `deterministic: true`",
    )


class AlgorithmConfig(Section):
    name: Literal["ppo", "grpo"] = "ppo"
    gamma: Fraction = Field(
        default=0.99, description="discount per chunk step; per env step where each action has a value"
    )
    lam: Fraction = Field(default=0.95, description="GAE lambda")
    lr: Annotated[float, Field(gt=0)] = 3e-4
    value_lr: Annotated[float, Field(gt=0)] | None = Field(default=None, description="default: lr")
    lr_schedule: Literal["constant", "linear"] = "constant"
    lr_warmup: Annotated[int, Field(ge=0)] = Field(
        default=0, description="iterations, after `critic_warmup`, in which the rate rises; the critic's does not wait"
    )
    epochs: Positive = Field(default=4, description="passes over each iteration's batch")
    minibatches: Positive = Field(default=4, description="optimiser steps in each pass")
    micro_batch: Positive | None = Field(
        default=None, description="chunk steps in one forward pass; default: the whole minibatch"
    )
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    ratio_level: Literal["token", "action", "chunk"] = "chunk"
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum-constant"] = "token-mean"
    value_clip: Annotated[float, Field(gt=0)] | None = None
    value_loss: Literal["mse", "huber"] = "mse"
    huber_delta: Annotated[float, Field(gt=0)] = 10.0
    value_coef: NonNegative = 1.0
    entropy_coef: NonNegative = 0.0
    entropy_level: Literal["token", "action", "chunk"] = Field(
        default="chunk", description="the entropy is that of one of these, on average"
    )
    critic_warmup: Annotated[int, Field(ge=0)] = Field(
        default=0, description="first iterations, in which nothing but the critic's own parameters learns"
    )
    kl_coef: NonNegative = Field(
        default=0.0, description="weight of the divergence from the policy that the run began with, for each token"
    )
    kl_kind: Literal["k2", "k3"] = Field(default="k3", description="estimator of that divergence")
    target_kl: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="stop the passes of an iteration beyond it"
    )
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.5
    normalise_advantage: Literal["minibatch", "batch", "none"] = "minibatch"
    group_size: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=8, description="GRPO: episodes from one initial state"
    )
    group_advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline"] = "grpo"
    group_score: Literal["success", "return"] = Field(
        default="return", description="GRPO: what is compared inside a group"
    )
    filter_low: Fraction | None = Field(default=None, description="GRPO: drop groups whose mean success is lower")
    filter_high: Fraction | None = Field(default=None, description="GRPO: drop groups whose mean success is higher")
    filter_rollouts: Positive = Field(
        default=1,
        description="GRPO: at most so many times `rollout.epochs` rollouts, until as many groups remain as if none "
        "were dropped",
    )

    @property
    def filters_groups(self) -> bool:
        """Whether groups are dropped."""
        return self.name == "grpo" and (self.filter_low, self.filter_high) != (None, None)


class SFTConfig(Section):
    """Supervised fine-tuning by `embodied-rl sft`; learning rate and micro-batches are those of `algorithm`."""

    data: str | None = Field(default=None, min_length=1, description="directory of demonstrations, as --data")
    episodes: Positive = Field(default=200, description="demonstrations that `embodied-rl collect` makes")
    noise: Fraction = Field(
        default=0.0, description="standard deviation of what disturbs each action there (the gripper's excepted)"
    )
    speed: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="what the scripted expert's actions there are multiplied by (the gripper's excepted)"
    )
    batch: Positive = Field(default=64, description="demonstrated decisions in one optimiser step")
    steps: Positive = Field(default=50, description="optimiser steps in one iteration")
    held_out: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.05, description="share of the episodes that only measures"
    )


class TrainConfig(Section):
    iterations: Positive = 100
    stop_at_success: Fraction | None = Field(
        default=None, description="stop once an evaluation during training reaches it"
    )
    checkpoint_every: Positive = Field(default=10, description="iterations; the last iteration is always saved")
    keep_checkpoints: Positive = 3


class EvaluationConfig(Section):
    """Success on seeds that training never uses; the final evaluation has seeds of its own."""

    every: Annotated[int, Field(ge=0)] = Field(default=10, description="iterations; 0: only at the end")
    episodes: Positive = Field(default=32, description="episodes of an evaluation during training")
    final_episodes: Positive = 100
    deterministic: bool = Field(default=True, description="the policy's mean action")
    temperature: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="of tokens, where actions are sampled; default: that of training"
    )
    before: bool = Field(default=False, description="evaluate and film the policy that the run begins with, too")
    videos: Annotated[int, Field(ge=0)] = Field(default=2, description="videos of the final evaluation, failures first")


class TrackingConfig(Section):
    project: str = "embodied-rl"
    wandb: Literal["auto", "online", "offline", "disabled"] = Field(
        default="auto", description="auto: online if a key is known"
    )
    tensorboard: bool = True


class ClusterConfig(Section):
    address: str | None = Field(default=None, description="Ray cluster to join; default: this machine")
    cpu_slots: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        default=None, description="CPU slots that count as devices; default: usable cores"
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(default=600.0, description="longest wait for a worker in one call")


def first_placement(placement: str) -> str:
    """Where the worker groups are before a plan moves them."""
    return "actor, rollout, env: all" if placement == "auto" else placement


class Config(Section):
    """One run. See `recipes/` for examples."""

    name: RunName | None = Field(default=None, description="run directory under run_root; default: the recipe's name")
    run_root: str = Field(default="runs", min_length=1, description="directory that holds the runs")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    deterministic: bool = Field(
        default=False, description="infer in fixed blocks, so that results do not depend on pipeline stages"
    )
    inference_block: Positive = Field(default=1, description="envs in one inference block under `deterministic`")
    placement: str = Field(
        default="auto",
        description="which devices each worker group uses; auto: planned from measurements, on all devices until then",
    )
    env: EnvConfig = EnvConfig()
    policy: PolicyConfig = PolicyConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    sft: SFTConfig = SFTConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def pipeline_choices(self) -> tuple[int, ...]:
        """The numbers of pipeline groups of each env worker that a plan may choose from."""
        if self.rollout.pipeline_stages != "auto":
            return (self.rollout.pipeline_stages,)
        whole = math.lcm(self.algorithm.group_size if self.algorithm.name == "grpo" else 1, self.inference_block)
        return tuple(groups for groups in (1, 2, 4) if self.env.num_envs % (groups * whole) == 0) or (1,)

    @property
    def initial_placement(self) -> str:
        """Where the worker groups are before anything has been measured."""
        return first_placement(self.placement)

    @property
    def chunk_steps(self) -> int:
        """T: policy calls per env in one iteration."""
        return self.rollout.steps // self.policy.chunk
