"""Kinds of runs that other packages bring: modules named by the entry points of `embodied_rl.kinds`."""

from __future__ import annotations

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
    """The kind of a run by the name of its recipe, or by a section in its file that only one has; None: embodied."""
    if recipe in EMBODIED.names():
        return None
    for kind in kinds().values():
        if not kind.RECIPES.is_path(recipe):
            if recipe in kind.RECIPES.names():
                return kind
            continue
        try:
            content = yaml.safe_load(kind.RECIPES.path(recipe).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            continue
        if isinstance(content, dict) and set(content) & (
            set(kind.RECIPES.model.model_fields) - set(Config.model_fields)
        ):
            return kind
    return None
