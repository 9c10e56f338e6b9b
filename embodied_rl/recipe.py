"""Reads a recipe and the overrides of the command line into a `Config`, collecting every fault on the way.

A value that is not understood is reported and replaced by its default, so that the rest can still be checked.
What needs the machine (simulators, assets, directories) is checked in `preflight.py`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from embodied_rl.config import Config
from embodied_rl.consistency import consistency_faults
from embodied_rl.faults import Fault, any_of, defaulted_keys
from embodied_rl.schema import all_keys, nearest_keys, nearest_value, sections

RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = "maniskill_pushcube_ppo"
PATH_KEYS = ("name", "run_root")


def load_recipe(recipe: str | dict[str, Any], overrides: Sequence[str]) -> tuple[Config, list[Fault]]:
    """The configuration of a run as `read_recipe` reads it, and everything that keeps it from being trained."""
    config, faults = read_recipe(recipe, overrides)
    return config, faults + consistency_faults(config, defaulted_keys(faults))


def read_recipe(recipe: str | dict[str, Any], overrides: Sequence[str]) -> tuple[Config, list[Fault]]:
    """A configuration, and every key and value in it that is wrong by itself.

    Args:
        recipe: the name of a recipe in `embodied_rl/recipes`, the path of a YAML file, or a run directory
            (then its `config.yaml` is read); or what a recipe's file would hold.
        overrides: `key.sub=value`, the value in YAML; these win over the recipe.

    With faults, the configuration is fit for further checks only: keys in question hold their defaults.
    """
    faults: list[Fault] = []
    layer = _read_recipe(recipe, faults) if isinstance(recipe, str) else recipe
    values = dict(_flatten(layer, faults))
    values.update(_read_overrides(overrides, faults))
    known = {}
    for key, value in values.items():
        if key in all_keys():
            known[key] = _without_trailing_slash(value) if key in PATH_KEYS else value
        else:
            near = nearest_keys(key)
            hint = f"nearest key: {any_of(near)}" if near else "see `embodied-rl keys`"
            faults.append(Fault(key, value, "no such key", hint, defaulted=tuple(near)))
    return _validate(known, faults), faults


def recipe_names() -> dict[str, str]:
    """Every recipe that comes with the package, with its first comment line."""
    names = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        names[path.stem] = first.lstrip("# ") if first.startswith("#") else ""
    return names


def recipe_name(recipe: str) -> str:
    """What a run of this recipe is called by default."""
    return Path(recipe).name.removesuffix(".yaml").removesuffix(".yml")


def run_directory(recipe: str) -> Path | None:
    """The run directory that was given in place of a recipe, if one was."""
    return Path(recipe) if _is_path(recipe) and Path(recipe).is_dir() else None


# --- the recipe file ----------------------------------------------------------------------------------------


def _is_path(recipe: str) -> bool:
    recipe = recipe.rstrip("/")
    if recipe in recipe_names():  # wins over a directory that happens to be called the same
        return False
    return "/" in recipe or recipe.endswith((".yaml", ".yml")) or Path(recipe).is_dir()


def _read_recipe(recipe: str, faults: list[Fault]) -> dict[str, Any]:
    """The file's mapping; {} if nothing can be read, with every key marked as not understood."""

    def fail(problem: str, hint: str = "") -> dict[str, Any]:
        faults.append(Fault("recipe", recipe, problem, hint, defaulted=tuple(all_keys())))
        return {}

    path = Path(recipe) if _is_path(recipe) else RECIPES / f"{recipe.rstrip('/')}.yaml"
    if run_dir := run_directory(recipe):
        path = run_dir / "config.yaml"
        if not path.exists():
            return fail("a directory without config.yaml, so not a run")
    if not path.exists():
        close = difflib.get_close_matches(path.stem, recipe_names(), n=3, cutoff=0.4)
        what = "no such file" if _is_path(recipe) else "no such recipe"
        return fail(what, f"nearest recipes: {any_of(close)}" if close else f"recipes: {any_of(recipe_names())}")
    try:
        data = _parse_yaml(path.read_text(encoding="utf-8"), faults)
    except (OSError, UnicodeDecodeError) as error:
        return fail(f"cannot be read: {error}")
    except yaml.YAMLError as error:
        return fail(f"not valid YAML: {_where(error)}", "a text that holds ': ' or starts with a sign needs quotes")
    if not isinstance(data, dict | None):
        return fail("not a mapping of keys to values")
    return data or {}


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but numbers such as 1e-3 are numbers, not texts."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parse_yaml(text: str, faults: list[Fault], prefix: str = "") -> Any:
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    faults.extend(_repeated_keys(node, prefix))
    try:
        return loader.construct_document(node)
    except ValueError as error:  # a date that does not exist, say
        raise yaml.YAMLError(str(error)) from None


def _repeated_keys(node: yaml.Node, prefix: str) -> Iterator[Fault]:
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = f"{prefix}{key_node.value}", key_node.start_mark.line + 1
        if key in lines:
            problem = f"given twice, in lines {lines[key]} and {line}"
            hit = tuple(name for name in all_keys() if f"{name}.".startswith(f"{key}."))
            yield Fault(key, None, problem, "remove one of them", defaulted=hit)
        lines[key] = line
        yield from _repeated_keys(value_node, f"{key}.")


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem


# --- overrides and values -----------------------------------------------------------------------------------


def _read_overrides(overrides: Sequence[str], faults: list[Fault]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not re.fullmatch(r"[\w.-]+", key):
            faults.append(Fault("command line", override, "expected key=value", "for example env.num_envs=16"))
            continue
        if not text:
            problem = f"no value after '='; expected {all_keys()[key].expected}" if key in all_keys() else "no value"
            faults.append(Fault(key, "", problem, f"for the default, leave {key} out", defaulted=(key,)))
            continue
        try:
            nested = _parse_yaml(text, faults, f"{key}.")
        except yaml.YAMLError as error:
            if not _takes_text(key):
                faults.append(Fault(key, text, f"not valid YAML: {_where(error)}", defaulted=(key,)))
                continue
            nested = text
        if _takes_text(key) and not isinstance(nested, str | None):
            nested = text  # what YAML makes of "env: 0; actor: 1" or of a run called 2024 is not meant
        for name in reversed(key.split(".")):
            nested = {name: nested}
        for name, leaf in _flatten(nested, faults):
            if name in given:
                problem = f"given twice on the command line: {given[name]} and {leaf}"
                faults.append(Fault(name, None, problem, "remove one of them", defaulted=(name,)))
            given[name] = leaf
    return given


def _takes_text(key: str) -> bool:
    spec = all_keys()[key].spec if key in all_keys() else {}
    return any(
        option.get("type") == "string" and not {"enum", "const"} & option.keys() for option in spec.get("anyOf", [spec])
    )


def _flatten(data: dict[Any, Any], faults: list[Fault], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        key = f"{prefix}{name}"
        if key in sections() and not isinstance(value, dict | None):
            inside = tuple(name for name in all_keys() if name.startswith(f"{key}."))
            hint = f"its keys: `embodied-rl keys {key}`"
            faults.append(Fault(key, value, "a group of keys, not a value", hint, defaulted=inside))
        elif key in sections() or (isinstance(value, dict) and value and key not in all_keys()):
            yield from _flatten(value or {}, faults, f"{key}.")
        else:
            yield key, {str(item): value[item] for item in value} if isinstance(value, dict) else value


def _without_trailing_slash(value: Any) -> Any:
    return (value.rstrip("/") or "/") if isinstance(value, str) and value else value


def _validate(values: dict[str, Any], faults: list[Fault]) -> Config:
    """Validates strictly (no text for a number, no 1 for true); drops a faulty key and tries again."""
    values = dict(values)
    while True:
        nested: dict[str, Any] = {}
        for name, value in values.items():
            *path, leaf = name.split(".")
            section = nested
            for part in path:
                section = section.setdefault(part, {})
            section[leaf] = value
        try:
            # Through JSON: in strict mode only there a list is a tuple.
            return Config.model_validate_json(json.dumps(nested, default=str), strict=True)
        except pydantic.ValidationError as error:
            for name, kind in {_key_at(detail["loc"]): detail["type"] for detail in error.errors()}.items():
                faults.append(_value_fault(name, values.pop(name), kind))


def _key_at(location: tuple[int | str, ...]) -> str:
    """The key of an error, which may lie deeper, in an element of the key's value."""
    parts = [str(part) for part in location]
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next(name for name in names if name in all_keys())


def _value_fault(name: str, value: Any, kind: str) -> Fault:
    key = all_keys()[name]
    near = nearest_value(key, value)
    problem = f"expected {key.expected}"
    if kind.endswith(("_type", "_parsing")) and not isinstance(value, list | dict):
        problem = f"{_type_words(value)}; {problem}"
    hint = f"nearest valid: {near}" if near else (key.description and f"{name}: {key.description}")
    return Fault(name, value, problem, hint, defaulted=(name,))


def _type_words(value: Any) -> str:
    words = {str: "a text", bool: "true or false", int: "an integer", float: "a decimal number"}
    return "null" if value is None else words.get(type(value), f"a {type(value).__name__}")
