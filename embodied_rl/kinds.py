"""Kinds of runs that other packages bring: modules named by the entry points of `embodied_rl.kinds`."""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import yaml

from embodied_rl.config import Config
from embodied_rl.recipe import EMBODIED, Recipes


class Kind(Protocol):
    """What such a module holds. Its functions check what they are asked, and return an exit code."""

    RECIPES: Recipes[Any]

    def train(self, words: list[str], resume: bool, dry_run: bool, command: str) -> int:
        """`embodied-rl train WORDS`; the first word is the recipe."""

    def evaluate(self, words: list[str], benchmark: str, samples: int, temperature: float, out: Path | None) -> int:
        """`embodied-rl eval WORDS --benchmark ...`."""


def kinds() -> dict[str, Kind]:
    """All of them by name."""
    return {entry.name: entry.load() for entry in entry_points(group="embodied_rl.kinds")}


def kind_of(recipe: str) -> Kind | None:
    """Of a run, by the nearest name of a recipe or by a section of its file that only one has; None: embodied."""
    if recipe in EMBODIED.names():
        return None
    found = kinds().values()
    owners = dict[str, Kind | None].fromkeys(EMBODIED.names()) | {
        n: kind for kind in found for n in kind.RECIPES.names()
    }
    if recipe in owners or not EMBODIED.is_path(recipe):
        near = difflib.get_close_matches(recipe, owners, n=1, cutoff=0.4)
        return owners[near[0]] if near else None
    try:
        content = yaml.safe_load(EMBODIED.path(recipe).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    sections = set(content) - set(Config.model_fields) if isinstance(content, dict) else set()
    return next((kind for kind in found if sections & set(kind.RECIPES.model.model_fields)), None)
