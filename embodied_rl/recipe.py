"""Reads a recipe and the overrides of the command line into a configuration, collecting every fault on the way.

There are kinds of runs (`Recipes`): the embodied one, and those that other packages bring (`kinds.py`). A value that is
not understood is reported and replaced by its default, so that the rest can still be checked. What needs the machine
(simulators, assets, directories) is checked in `preflight.py`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pydantic
import yaml

from embodied_rl.config import Config, Section
from embodied_rl.consistency import consistency_faults
from embodied_rl.faults import Fault, any_of, defaulted_keys
from embodied_rl.schema import Key, all_keys, nearest_keys, nearest_value, sections

DEFAULT_RECIPE = "maniskill_pushcube_ppo"
PATH_KEYS = ("name", "run_root")
Model = TypeVar("Model", bound=Section)


@dataclass(frozen=True)
class Recipes(Generic[Model]):
    """A kind of run: the model of its configuration, and the folder of its recipes."""

    model: type[Model]
    folder: Path

    def names(self) -> dict[str, str]:
        """Every recipe that comes with the package, with its first comment line."""
        names = {}
        for path in sorted(self.folder.glob("*.yaml")):
            first = path.read_text(encoding="utf-8").partition("\n")[0]
            names[path.stem] = first.lstrip("# ") if first.startswith("#") else ""
        return names

    def read(self, recipe: str | dict[str, Any], overrides: Sequence[str]) -> tuple[Model, list[Fault]]:
        """A configuration, and every key and value in it that is wrong by itself.

        Args:
            recipe: the name of a recipe, the path of a YAML file, or a run directory (then its `config.yaml` is read);
                or what a recipe's file would hold.
            overrides: `key.sub=value`, the value in YAML; these win over the recipe.

        With faults, the configuration is fit for further checks only: keys in question hold their defaults.
        """
        return _Reading(self).read(recipe, overrides)

    def run_directory(self, recipe: str) -> Path | None:
        """The run directory that was given in place of a recipe, if one was."""
        return Path(recipe) if self.is_path(recipe) and Path(recipe).is_dir() else None

    def is_path(self, recipe: str) -> bool:
        """Whether a file or directory is meant, not the name of a recipe."""
        recipe = recipe.rstrip("/")
        if recipe in self.names():  # wins over a directory that happens to be called the same
            return False
        return "/" in recipe or recipe.endswith((".yaml", ".yml")) or Path(recipe).is_dir()

    def path(self, recipe: str) -> Path:
        """The file of a recipe, which may not exist."""
        path = Path(recipe) if self.is_path(recipe) else self.folder / f"{recipe.rstrip('/')}.yaml"
        return path / "config.yaml" if self.run_directory(recipe) else path


EMBODIED = Recipes(Config, Path(__file__).parent / "recipes")


def load_recipe(recipe: str | dict[str, Any], overrides: Sequence[str]) -> tuple[Config, list[Fault]]:
    """The configuration of an embodied run, and everything that keeps it from being trained."""
    config, faults = EMBODIED.read(recipe, overrides)
    return config, faults + consistency_faults(config, defaulted_keys(faults))


def recipe_name(recipe: str) -> str:
    """What a run of this recipe is called by default."""
    return Path(recipe).name.removesuffix(".yaml").removesuffix(".yml")


# --- reading ------------------------------------------------------------------------------------------------


class _Reading(Generic[Model]):
    """One recipe being read: what was wrong so far."""

    def __init__(self, recipes: Recipes[Model]) -> None:
        self.recipes, self.model = recipes, recipes.model
        self.keys, self.sections = all_keys(recipes.model), sections(recipes.model)
        self.faults: list[Fault] = []

    def read(self, recipe: str | dict[str, Any], overrides: Sequence[str]) -> tuple[Model, list[Fault]]:
        values = {**self._layers(recipe), **self._overrides(overrides)}
        known = {}
        for key, value in values.items():
            if key in self.keys:
                known[key] = _without_trailing_slash(value) if key in PATH_KEYS else value
            else:
                near = nearest_keys(key, self.model)
                hint = f"nearest key: {any_of(near)}" if near else "see `embodied-rl keys`"
                self.faults.append(Fault(key, value, "no such key", hint, defaulted=tuple(near)))
        return self._validate(known), self.faults

    def _layers(self, recipe: str | dict[str, Any], above: tuple[str, ...] = ()) -> dict[str, Any]:
        """The flat values of a recipe over those of its `base`, the recipe that it starts from."""
        layer = dict(self._file(recipe) if isinstance(recipe, str) else recipe)
        base = layer.pop("base", None)
        if isinstance(recipe, str):
            above = (*above, recipe)
        below = {}
        if base in above or not isinstance(base, str | None):
            problem = "is based on itself" if base in above else "expected the name of a recipe, or a path"
            self.faults.append(Fault("base", base, problem, defaulted=tuple(self.keys)))
        elif base is not None:
            below = self._layers(base, above)
        return {**below, **dict(self._flatten(layer))}

    def _file(self, recipe: str) -> dict[str, Any]:
        """The file's mapping; {} if nothing can be read, with every key marked as not understood."""

        def fail(problem: str, hint: str = "") -> dict[str, Any]:
            self.faults.append(Fault("recipe", recipe, problem, hint, defaulted=tuple(self.keys)))
            return {}

        path, names = self.recipes.path(recipe), self.recipes.names()
        if not path.exists():
            if self.recipes.run_directory(recipe):
                return fail("a directory without config.yaml, so not a run")
            close = difflib.get_close_matches(path.stem, names, n=3, cutoff=0.4)
            what = "no such file" if self.recipes.is_path(recipe) else "no such recipe"
            return fail(what, f"nearest recipes: {any_of(close)}" if close else "see `embodied-rl recipes`")
        try:
            data = self._parse_yaml(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            return fail(f"cannot be read: {error}")
        except yaml.YAMLError as error:
            return fail(f"not valid YAML: {_where(error)}", "a text that holds ': ' or starts with a sign needs quotes")
        if not isinstance(data, dict | None):
            return fail("not a mapping of keys to values")
        return data or {}

    def _parse_yaml(self, text: str, prefix: str = "") -> Any:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        self.faults.extend(self._repeated_keys(node, prefix))
        try:
            return loader.construct_document(node)
        except ValueError as error:  # a date that does not exist, say
            raise yaml.YAMLError(str(error)) from None

    def _repeated_keys(self, node: yaml.Node, prefix: str) -> Iterator[Fault]:
        if not isinstance(node, yaml.MappingNode):
            return
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = f"{prefix}{key_node.value}", key_node.start_mark.line + 1
            if key in lines:
                problem = f"given twice, in lines {lines[key]} and {line}"
                hit = tuple(name for name in self.keys if f"{name}.".startswith(f"{key}."))
                yield Fault(key, None, problem, "remove one of them", defaulted=hit)
            lines[key] = line
            yield from self._repeated_keys(value_node, f"{key}.")

    def _overrides(self, overrides: Sequence[str]) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for override in overrides:
            key, equals, text = override.partition("=")
            if not equals or not re.fullmatch(r"[\w.-]+", key):
                example = f"for example {next(name for name in self.keys if '.lr' in name)}=1e-4"
                self.faults.append(Fault("command line", override, "expected key=value", example))
                continue
            if not text:
                problem = f"no value after '='; expected {self.keys[key].expected}" if key in self.keys else "no value"
                hint = f"for the default, leave {key} out"
                self.faults.append(Fault(key, "", problem, hint, defaulted=(key,)))
                continue
            try:
                nested = self._parse_yaml(text, f"{key}.")
            except yaml.YAMLError as error:
                if not self._takes_text(key):
                    problem = f"not valid YAML: {_where(error)}"
                    self.faults.append(Fault(key, text, problem, defaulted=(key,)))
                    continue
                nested = text
            if self._takes_text(key) and not isinstance(nested, str | None):
                nested = text  # what YAML makes of "env: 0; actor: 1" or of a run called 2024 is not meant
            for name in reversed(key.split(".")):
                nested = {name: nested}
            for name, leaf in self._flatten(nested):
                if name in given:
                    problem = f"given twice on the command line: {given[name]} and {leaf}"
                    self.faults.append(Fault(name, None, problem, "remove one of them", defaulted=(name,)))
                given[name] = leaf
        return given

    def _takes_text(self, key: str) -> bool:
        spec = self.keys[key].spec if key in self.keys else {}
        options = spec.get("anyOf", [spec])
        return any(option.get("type") == "string" and not {"enum", "const"} & option.keys() for option in options)

    def _flatten(self, data: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in data.items():
            key = f"{prefix}{name}"
            if key in self.sections and not isinstance(value, dict | None):
                inside = tuple(name for name in self.keys if name.startswith(f"{key}."))
                hint = f"its keys: `embodied-rl keys {key}`"
                self.faults.append(Fault(key, value, "a group of keys, not a value", hint, defaulted=inside))
            elif key in self.sections or (isinstance(value, dict) and value and key not in self.keys):
                yield from self._flatten(value or {}, f"{key}.")
            else:
                yield key, {str(item): value[item] for item in value} if isinstance(value, dict) else value

    def _validate(self, values: dict[str, Any]) -> Model:
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
                return self.model.model_validate_json(json.dumps(nested, default=str), strict=True)
            except pydantic.ValidationError as error:
                for name, kind in {self._key_at(detail["loc"]): detail["type"] for detail in error.errors()}.items():
                    self.faults.append(_value_fault(self.keys[name], values.pop(name), kind))

    def _key_at(self, location: tuple[int | str, ...]) -> str:
        """The key of an error, which may lie deeper, in an element of the key's value."""
        parts = [str(part) for part in location]
        names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next(name for name in names if name in self.keys)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but numbers such as 1e-3 are numbers, not texts."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem


def _without_trailing_slash(value: Any) -> Any:
    return (value.rstrip("/") or "/") if isinstance(value, str) and value else value


def _value_fault(key: Key, value: Any, kind: str) -> Fault:
    near = nearest_value(key, value)
    problem = f"expected {key.expected}"
    if kind.endswith(("_type", "_parsing")) and not isinstance(value, list | dict):
        problem = f"{_type_words(value)}; {problem}"
    hint = f"nearest valid: {near}" if near else (key.description and f"{key.name}: {key.description}")
    return Fault(key.name, value, problem, hint, defaulted=(key.name,))


def _type_words(value: Any) -> str:
    words = {str: "a text", bool: "true or false", int: "an integer", float: "a decimal number"}
    return "null" if value is None else words.get(type(value), f"a {type(value).__name__}")
