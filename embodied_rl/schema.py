"""Every configuration key with the values it takes, in the user's words, drawn from the model of a kind of run.

That is the one in `config.py` unless another is given. For messages and for `embodied-rl keys`; reading values lives in
`recipe.py`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from embodied_rl.config import Config, Section

TYPE_WORDS = {"integer": "an integer", "number": "a number", "string": "a text", "boolean": "true or false"}


@dataclass(frozen=True)
class Key:
    """One key: dotted `name`, the values it takes in words, its default, what it means, its JSON schema."""

    name: str
    expected: str
    default: Any
    description: str
    spec: dict[str, Any]


@cache
def all_keys(model: type[Section] = Config) -> dict[str, Key]:
    """Every key by its dotted name, in the order of the model."""
    schema = model.model_json_schema()
    found: dict[str, Key] = {}

    def collect(properties: dict[str, Any], defaults: dict[str, Any], prefix: str) -> None:
        for name, spec in properties.items():
            if "$ref" in spec:
                section = schema["$defs"][spec["$ref"].rsplit("/", 1)[-1]]
                collect(section["properties"], defaults[name], f"{prefix}{name}.")
                continue
            key = prefix + name
            found[key] = Key(key, expectation(spec), defaults[name], spec.get("description", ""), spec)

    collect(schema["properties"], model().model_dump(mode="json"), "")
    return found


@cache
def sections(model: type[Section] = Config) -> frozenset[str]:
    """Names of the groups of keys."""
    return frozenset(name.rsplit(".", 1)[0] for name in all_keys(model) if "." in name)


def flat(data: dict[str, Any], model: type[Section] = Config, prefix: str = "") -> dict[str, Any]:
    """A dumped configuration as dotted key -> value."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        found |= flat(value, model, f"{key}.") if key in sections(model) else {key: value}
    return found


def expectation(spec: dict[str, Any]) -> str:
    """The values that a JSON schema admits, as a phrase: "an integer >= 1 or null"."""
    if "expected" in spec:
        return str(spec["expected"])
    if "anyOf" in spec:
        return " or ".join(expectation(option) for option in spec["anyOf"])
    if "const" in spec:
        return str(spec["const"])
    if "enum" in spec:
        return "one of " + ", ".join(map(str, spec["enum"]))
    kind = spec.get("type", "")
    if kind == "array":
        return f"a list, each {expectation(spec['items'])}"
    if kind == "object":
        example = spec.get("default") or {3: 0.0}
        key, value = next(iter(example.items()))
        return f"a mapping such as {{{key}: {value}}}, each value {expectation(spec['additionalProperties'])}"
    bounds = [
        f"{sign} {spec[name]:.15g}"
        for name, sign in (
            ("minimum", ">="),
            ("exclusiveMinimum", ">"),
            ("maximum", "<="),
            ("exclusiveMaximum", "<"),
        )
        if name in spec
    ]
    words = TYPE_WORDS.get(kind, kind)
    return f"{words} {' and '.join(bounds)}" if bounds else words


def nearest_keys(name: str, model: type[Section] = Config) -> list[str]:
    """Up to two existing keys that an unknown one may have meant; those of other sections count too, where the section
    is none or their last name is almost the one given."""
    section, _, leaf = name.rpartition(".")
    is_section = section in sections(model)
    scores = {}
    for key in all_keys(model):
        key_section, _, key_leaf = key.rpartition(".")
        alike = difflib.SequenceMatcher(None, leaf.lower(), key_leaf).ratio()
        whole = difflib.SequenceMatcher(None, section.lower(), key_section).ratio() if section else 0.5
        scores[key] = alike + 0.2 * whole if key_section == section or not is_section or alike > 0.8 else 0.0
    ranked = sorted(scores, key=lambda key: -scores[key])
    best = scores[ranked[0]]
    return [key for key in ranked[:2] if scores[key] >= 0.65 and scores[key] >= best - 0.1]


def nearest_value(key: Key, value: Any) -> str:
    """A value that `key` admits and that is near the one given, as it would be written; "" if none is."""
    options = key.spec.get("anyOf", [key.spec])
    for spec in options:
        kind = spec.get("type")
        if "enum" in spec and isinstance(value, str):
            close = difflib.get_close_matches(value.lower(), spec["enum"], n=1, cutoff=0.5)
            return close[0] if close else ""
        if kind in ("integer", "number") and isinstance(value, int | float) and not isinstance(value, bool):
            return _nearest_number(spec, value)
        if kind == "array" and not isinstance(value, list | dict | type(None)):
            return _list_of_one(spec.get("items", {}), value)
        if kind == "string" and "pattern" not in spec and isinstance(value, bool | int | float):
            return f"""'"{value}"' (quoted twice, once for the shell)"""
        if kind == "boolean" and value in (0, 1):
            return "true" if value else "false"
    return ""


def _list_of_one(item: dict[str, Any], value: Any) -> str:
    """A list of the value, or of what is near it and may stand in the list; "" if nothing may."""
    if "enum" in item and value not in item["enum"]:
        close = difflib.get_close_matches(str(value).lower(), item["enum"], n=1, cutoff=0.5)
        return f"[{close[0]}]" if close else ""
    return f"[{value}]" if re.search(item.get("pattern", ""), str(value)) else ""


def _nearest_number(spec: dict[str, Any], value: float) -> str:
    integer = spec["type"] == "integer"
    low, high = spec.get("minimum"), spec.get("maximum")
    if integer and "exclusiveMaximum" in spec:
        high = spec["exclusiveMaximum"] - 1
    if value != value or abs(value) == float("inf"):
        return ""
    if integer:
        value = round(value)
    if low is not None and value < low:
        value = low
    if high is not None and value > high:
        value = high
    beyond_open_end = value <= spec.get("exclusiveMinimum", -float("inf")) or value >= spec.get(
        "exclusiveMaximum", float("inf")
    )
    return "" if beyond_open_end else f"{value:.15g}"
