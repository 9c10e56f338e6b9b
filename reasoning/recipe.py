"""Reads a reasoning recipe and the overrides of the command line, and finds everything that is wrong with them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from embodied_rl.faults import Fault, any_of
from reasoning.config import MathConfig, with_preset
from reasoning.tasks import TASKS
from scheduler.placement import PlacementError, local_device_count, parse_placement

RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = "smollm2_arithmetic"


def recipe_names() -> dict[str, str]:
    """Every recipe that comes with the package, with its first comment line."""
    paths = sorted(RECIPES.glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in paths}


def load_recipe(recipe: str, overrides: Sequence[str]) -> tuple[MathConfig, list[Fault]]:
    """The configuration of a run, and everything by which it cannot be run.

    Args:
        recipe: the name of a recipe, the path of a YAML file, or a run directory.
        overrides: `key.sub=value`, the value in YAML; these win over the recipe.

    With faults the configuration is the default one.
    """
    path = RECIPES / f"{recipe}.yaml"
    if not path.is_file():
        path = Path(recipe) / "config.yaml" if Path(recipe).is_dir() else Path(recipe)
    try:
        values = dict(_flat(yaml.safe_load(path.read_text(encoding="utf-8")) or {}))
    except OSError:
        near = difflib.get_close_matches(recipe, recipe_names(), n=3, cutoff=0.4) or list(recipe_names())
        return MathConfig(), [Fault("recipe", recipe, "no such recipe, file or run", f"recipes: {any_of(near)}")]
    except (yaml.YAMLError, AttributeError) as error:
        return MathConfig(), [Fault("recipe", recipe, f"not a mapping in YAML: {error}")]
    faults = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not text:
            faults.append(Fault("command line", override, "expected key=value", "for example algorithm.lr=1e-6"))
            continue
        takes_text = isinstance(keys().get(key), str)  # what YAML makes of "actor: 0" is not meant
        try:
            values |= {key: text} if takes_text else dict(_flat({key: yaml.safe_load(text)}))
        except yaml.YAMLError as error:
            faults.append(Fault(key, text, f"not valid YAML: {error}"))
    faults += [_unknown(key, value) for key, value in values.items() if key not in keys()]
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = value
    try:
        config = MathConfig.model_validate(nested) if not faults else MathConfig()
    except pydantic.ValidationError as error:
        faults += [Fault(".".join(map(str, e["loc"])), e["input"], e["msg"]) for e in error.errors()]
        return MathConfig(), faults
    return with_preset(config), faults or list(_inconsistencies(config))


def keys() -> dict[str, Any]:
    """Every key by its dotted name, with its default."""
    return dict(_flat(MathConfig().model_dump(mode="json")))


def _flat(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key != "reward.functions":
            yield from _flat(value, f"{key}.")
        else:
            # YAML 1.1 reads 1e-3 as a text
            is_number = isinstance(value, str) and value.replace("e-", "", 1).replace(".", "", 1).isdigit()
            yield key, float(value) if is_number and "e-" in str(value) else value


def _unknown(key: str, value: Any) -> Fault:
    near = difflib.get_close_matches(key, keys(), n=2, cutoff=0.6)
    return Fault(key, value, "no such key", f"nearest key: {any_of(near)}" if near else "")


def _inconsistencies(config: MathConfig) -> Iterator[Fault]:
    for key in ("train", "test"):
        name = getattr(config.data, key)
        if name not in TASKS and Path(name).suffix not in (".jsonl", ".parquet"):
            near = difflib.get_close_matches(name, TASKS, n=1)
            hint = f"nearest: {any_of(near)}" if near else f"generated sets: {', '.join(TASKS)}"
            yield Fault(f"data.{key}", name, "neither a .jsonl or .parquet file nor a generated set", hint)
    if config.algorithm.kl_coef and config.train.warm_start:
        problem = "a warm start has no reference model to stay near to"
        yield Fault("algorithm.kl_coef", config.algorithm.kl_coef, problem, "nearest valid: 0")
    if config.reward.overlong_buffer > config.sampling.max_new_tokens:
        problem = f"more than sampling.max_new_tokens ({config.sampling.max_new_tokens})"
        yield Fault("reward.overlong_buffer", config.reward.overlong_buffer, problem)
    if config.sampling.prompts < config.algorithm.minibatches:
        problem = f"fewer than algorithm.minibatches ({config.algorithm.minibatches})"
        yield Fault("sampling.prompts", config.sampling.prompts, problem)
    if config.placement != "auto" and config.cluster.address is None:
        count, kind = local_device_count(config.cluster.cpu_slots)
        try:
            place = parse_placement(config.placement, count, ("sampler", "judge", "actor"), kind)
            if (ranks := len(place["actor"].ranks)) > config.sampling.prompts:
                yield Fault("sampling.prompts", config.sampling.prompts, f"fewer than the {ranks} ranks of the actor")
        except PlacementError as error:
            yield Fault("placement", config.placement, str(error))


def dry_run_text(config: MathConfig, run_dir: Path) -> str:
    """The resolved configuration, and the memory of each worker, estimated from the model's `config.json`."""
    content = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return f"{content}\nwould write to {run_dir}\n{memory_text(config)}"


def memory_text(config: MathConfig) -> str:
    """GB that each worker needs on its device, with the formula; an estimate from the published shape of the model."""
    shape, source = _shape(config.model.path)
    hidden, layers, vocabulary = shape["hidden_size"], shape["num_hidden_layers"], shape["vocab_size"]
    heads = shape["num_attention_heads"]
    kv = hidden * shape.get("num_key_value_heads", heads) // heads
    block = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * shape["intermediate_size"]
    network = layers * block + vocabulary * hidden * (1 if shape.get("tie_word_embeddings") else 2)
    low = 2 if config.model.dtype == "bfloat16" else 4
    rank = config.model.lora_rank
    widths = 2 * 2 * hidden + 2 * (hidden + kv) + 3 * (hidden + shape["intermediate_size"])  # q o, k v, gate up down
    learned = network if rank is None else layers * rank * widths
    parameters = network * 4 if rank is None else network * low + learned * 4
    tokens = config.algorithm.token_budget
    kept = layers * hidden * tokens * low * (1 if config.model.gradient_checkpointing else 16)
    logits = 3 * tokens * vocabulary * 4
    reference = network * 4 if config.algorithm.kl_coef and rank is None else 0
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    cache = 2 * layers * kv * config.sampling.max_rows * longest
    rows = [
        ("actor, parameters", parameters + reference, "4 bytes each where trained, with the reference if there is one"),
        ("actor, gradients and Adam", learned * 12, f"{learned:,} learned parameters x 12 bytes"),
        ("actor, activations", kept + logits, f"{tokens} tokens x ({layers} layers x {hidden} + 3 x {vocabulary} x 4)"),
        ("sampler, parameters", network * low, f"{network:,} parameters x {low} bytes"),
        ("sampler, keys and values", cache * low, f"{config.sampling.max_rows} rows at their longest"),
    ]
    lines = [f"memory, estimated from {source}:"]
    lines += [f"  {name:26} {size / 1e9:8.2f} GB = {formula}" for name, size, formula in rows]
    return "\n".join([*lines, f"  {'in all':26} {sum(size for _, size, _ in rows) / 1e9:8.2f} GB"])


def _shape(path: str) -> tuple[dict[str, Any], str]:
    """What a model's `config.json` says, or what is published of a model that is not here."""
    file = Path(path) / "config.json"
    if file.is_file():
        return json.loads(file.read_text()), str(file)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for name, (*sizes, vocabulary, tied) in PUBLISHED.items():
        if name.lower() in path.lower():
            shape = dict(zip(names, sizes, strict=True)) | {"vocab_size": vocabulary, "tie_word_embeddings": tied}
            return shape, f"the published shape of {name}"
    return _shape("tiny")[0], "the preset tiny, because the model's own shape is not known here"


PUBLISHED: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "tiny": (128, 384, 4, 4, 4, 50, False),
    "smollm2-135m": (576, 1536, 30, 9, 3, 49152, True),
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
}
