"""Recipes of reasoning: which there are, and what in a configuration does not go together."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from embodied_rl.faults import Fault, any_of, defaulted_keys
from embodied_rl.recipe import Recipes
from reasoning.config import MathConfig, with_preset
from reasoning.tasks import TASKS
from scheduler.placement import PlacementError, local_device_count, parse_placement

RECIPES = Recipes(MathConfig, Path(__file__).parent / "recipes")
GROUPS = ("sampler", "judge", "actor")
BUILT_IN_REWARDS = ("accuracy", "format")
VLLM = "pip install vllm"


def load_recipe(recipe: str, overrides: Sequence[str]) -> tuple[MathConfig, list[Fault]]:
    """The configuration of a run as `Recipes.read` reads it, and everything that keeps it from being run."""
    config, faults = RECIPES.read(recipe, overrides)
    config, defaulted = with_preset(config), defaulted_keys(faults)
    return config, faults + [fault for fault in _inconsistencies(config) if fault.key not in defaulted]


def absences(config: MathConfig) -> list[Fault]:
    """What a run needs and is not on this machine, or is there and cannot be used: files of problems, the model,
    modules of reward functions."""
    from reasoning.data import DataError, load
    from reasoning.models import absent
    from reasoning.rewards import BUILT_IN, RewardError, import_function

    found = []
    for key, name in (("train", config.data.train), ("test", config.data.test)):
        if Path(name).suffix not in (".jsonl", ".parquet"):
            continue
        if not Path(name).is_file():
            problem = "is a directory" if Path(name).is_dir() else "does not exist"
            hint = f"generated sets: {', '.join(TASKS)}"
            found.append(Fault(f"data.{key}", name, problem, hint, obtainable=True))
            continue
        try:
            load(config.data, held_out=key == "test")
        except DataError as error:
            found.append(Fault(f"data.{key}", name, str(error), "mend it, or leave it out: data.skip_bad_lines=true"))
    if problem := absent(config.model.path):
        found.append(Fault("model.path", config.model.path, problem, "", obtainable=True))
    for name in config.reward.functions:
        if ":" in name and name not in BUILT_IN:
            try:
                import_function(name)
            except RewardError as error:
                found.append(Fault("reward.functions", name, str(error), "", obtainable=True))
    return found


def _inconsistencies(config: MathConfig) -> Iterator[Fault]:
    yield from _data(config)
    yield from _algorithm(config)
    yield from _rewards(config)
    yield from _sampling(config)
    if config.placement != "auto" and config.cluster.address is None:
        count, kind = local_device_count(config.cluster.cpu_slots)
        try:
            place = parse_placement(config.placement, count, GROUPS, kind)
            if (ranks := len(place["actor"].ranks)) > config.sampling.prompts:
                yield Fault("sampling.prompts", config.sampling.prompts, f"fewer than the {ranks} ranks of the actor")
        except PlacementError as error:
            yield Fault("placement", config.placement, str(error))


def _data(config: MathConfig) -> Iterator[Fault]:
    for key in ("train", "test"):
        name = getattr(config.data, key)
        if name not in TASKS and Path(name).suffix not in (".jsonl", ".parquet"):
            near = difflib.get_close_matches(name, TASKS, n=1)
            hint = f"nearest: {any_of(near)}" if near else f"generated sets: {', '.join(TASKS)}"
            yield Fault(f"data.{key}", name, "neither a .jsonl or .parquet file nor a generated set", hint)


def _algorithm(config: MathConfig) -> Iterator[Fault]:
    algorithm, sampling = config.algorithm, config.sampling
    if algorithm.kl_coef and config.train.warm_start:
        problem = "a warm start has no reference model to stay near to"
        yield Fault("algorithm.kl_coef", algorithm.kl_coef, problem, "nearest valid: 0")
    if sampling.prompts < algorithm.minibatches:
        yield Fault("sampling.prompts", sampling.prompts, f"fewer than algorithm.minibatches ({algorithm.minibatches})")
    if algorithm.refill and not algorithm.drop_flat_groups:
        problem = "no group is left out, so that none needs another in its place"
        yield Fault(
            "algorithm.refill", algorithm.refill, problem, "nearest valid: 0; or algorithm.drop_flat_groups true"
        )
    if algorithm.loss == "cispo" and algorithm.ratio_level != "token":
        yield Fault("algorithm.ratio_level", algorithm.ratio_level, "the loss cispo weights each token", "token")
    if algorithm.loss == "cispo" and algorithm.dual_clip is not None:
        yield Fault("algorithm.dual_clip", algorithm.dual_clip, "the loss cispo has no second clip", "null")
    if algorithm.name == "ppo" and algorithm.group_advantage is not None:
        problem = "ppo has its advantages from a critic, not from groups"
        yield Fault("algorithm.group_advantage", algorithm.group_advantage, problem, "null")
    if algorithm.name == "ppo" and algorithm.ratio_level != "token":
        yield Fault("algorithm.ratio_level", algorithm.ratio_level, "ppo has an advantage for each token", "token")
    whole_batch = {
        "algorithm.name=ppo": algorithm.name == "ppo",
        "algorithm.group_advantage=reinforce_baseline": algorithm.group_advantage == "reinforce_baseline",
        "algorithm.kl_in=reward": bool(algorithm.kl_coef) and algorithm.kl_in == "reward",
        "algorithm.kl_coef beside a ratio of sequences and a mean over tokens": bool(algorithm.kl_coef)
        and algorithm.kl_in == "loss"
        and algorithm.ratio_level == "sequence"
        and algorithm.aggregation != "sequence-mean",
        "algorithm.epochs and minibatches above 1": algorithm.epochs * algorithm.minibatches > 1,
        "algorithm.refill": algorithm.refill > 0,
        "sampling.ahead": sampling.ahead > 0,
    }
    if algorithm.elastic and (wrong := [name for name, is_set in whole_batch.items() if is_set]):
        problem = f"learns from each group by itself, and {any_of(wrong)} needs the whole batch"
        yield Fault("algorithm.elastic", True, problem, "nearest valid: false")


def _rewards(config: MathConfig) -> Iterator[Fault]:
    for name in config.reward.functions:
        if ":" not in name and name not in BUILT_IN_REWARDS:
            near = difflib.get_close_matches(name, BUILT_IN_REWARDS, n=1)
            hint = f"nearest: {any_of(near)}" if near else f"{', '.join(BUILT_IN_REWARDS)} or package.module:function"
            yield Fault("reward.functions", name, "no reward function", hint)


def _sampling(config: MathConfig) -> Iterator[Fault]:
    sampling, algorithm = config.sampling, config.algorithm
    if config.reward.overlong_buffer > sampling.max_new_tokens:
        problem = f"more than sampling.max_new_tokens ({sampling.max_new_tokens})"
        yield Fault("reward.overlong_buffer", config.reward.overlong_buffer, problem)
    if sampling.ahead and algorithm.refill:
        yield Fault("algorithm.refill", algorithm.refill, "sampling.ahead samples a fixed batch", "nearest valid: 0")
    if sampling.ahead and algorithm.importance_cap is None:
        problem = "completions of an older model (sampling.ahead) need the correction"
        yield Fault("algorithm.importance_cap", None, problem, "nearest valid: 2.0")
    if sampling.engine == "vllm":
        if importlib.util.find_spec("vllm") is None:
            yield Fault("sampling.engine", "vllm", "vLLM is not installed here", f"{VLLM}; or transformers")
        if config.model.lora_rank is not None:
            problem = "vllm takes whole networks, not adapters"
            yield Fault("model.lora_rank", config.model.lora_rank, problem, "nearest valid: null")
