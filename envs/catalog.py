"""What can be known about simulators without importing them: env ids, episode lengths, assets to download.

ManiSkill takes five seconds to import, prompts for downloads and may exit; its sources say the same in a
fraction of a second. Only what they state literally is read; of assets named in another way none is listed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANISKILL_FOLDERS = ("envs/tasks", "envs/scenes", "agents", "utils/scene_builder")
# Modules that gymnasium's own envs import, by the module their entry point lies in.
GYMNASIUM_NEEDS = {
    "gymnasium.envs.mujoco": "mujoco",
    "gymnasium.envs.box2d": "Box2D",
    "gymnasium.envs.phys2d": "jax",
    "gymnasium.envs.tabular": "jax",
}


@dataclass(frozen=True)
class MsEntry:
    """A registered ManiSkill env; `assets` are ids for `mani_skill.utils.download_asset`."""

    id: str
    max_episode_steps: int | None
    assets: tuple[str, ...]


@dataclass(frozen=True)
class GymEntry:
    """A registered gymnasium env; `needs` is a module that it imports and that may be missing."""

    id: str
    max_episode_steps: int | None
    needs: str | None


def maniskill_envs() -> dict[str, MsEntry]:
    """Every env that `import mani_skill.envs` registers, by id; empty if ManiSkill is not installed."""
    package = _package_folder()
    return _read_maniskill(package) if package else {}


def missing_assets(env_id: str) -> list[str]:
    """Asset ids that the env needs and that are not in ManiSkill's asset folder.

    Raises KeyError for an unknown env.
    """
    return absent_assets(maniskill_envs()[env_id].assets)


def absent_assets(assets: Sequence[str]) -> list[str]:
    """Those of these asset ids that are not in ManiSkill's asset folder; none without ManiSkill."""
    package = _package_folder()
    if package is None:
        return []
    sources, groups = _read_assets(package)
    root = asset_root()

    def is_missing(asset: str) -> bool:
        paths = [root / sources[asset]] if asset in sources else [root / path for path in groups.get(asset, [])]
        return not all(path.exists() for path in paths)

    return [asset for asset in assets if is_missing(asset)]


def asset_root() -> Path:
    """Where ManiSkill keeps downloaded assets: `$MS_ASSET_DIR/data`, by default `~/.maniskill/data`."""
    return Path(os.environ.get("MS_ASSET_DIR") or Path.home() / ".maniskill") / "data"


def download_command(assets: Sequence[str]) -> str:
    """The shell command that downloads the assets without asking."""
    return " && ".join(f"python -m mani_skill.utils.download_asset -y {asset}" for asset in assets)


def gymnasium_envs() -> dict[str, GymEntry]:
    """Every env in gymnasium's registry, by id; empty if gymnasium is not installed."""
    if importlib.util.find_spec("gymnasium") is None:
        return {}
    import gymnasium

    # Once ManiSkill is imported, its envs are in gymnasium's registry too.
    others = maniskill_envs() if "mani_skill" in sys.modules else {}
    entries = {}
    for spec in gymnasium.registry.values():
        if spec.id in others:
            continue
        where = spec.entry_point if isinstance(spec.entry_point, str) else ""
        needs = next((needed for module, needed in GYMNASIUM_NEEDS.items() if where.startswith(module)), None)
        entries[spec.id] = GymEntry(spec.id, spec.max_episode_steps, needs)
    return entries


# --- reading ManiSkill's sources ----------------------------------------------------------------------------


def _package_folder() -> Path | None:
    spec = importlib.util.find_spec("mani_skill")
    return Path(spec.origin).parent if spec and spec.origin else None


@dataclass
class _Class:
    """A class of the sources: what it was registered as, and what its methods say."""

    name: str
    file: Path
    bases: list[str]
    uid: str | None = None
    env_ids: dict[str, int | None] = field(default_factory=dict)
    assets: list[str] = field(default_factory=list)
    robots: list[str] = field(default_factory=list)  # uids or class names, of the nearest __init__ that says
    scene_builder: str | None = None  # the default of the constructor's argument
    builds_scene: str | None = None  # the name that a scene builder is registered under


@functools.cache
def _read_maniskill(package: Path) -> dict[str, MsEntry]:
    sources, _ = _read_assets(package)
    classes: dict[str, _Class] = {}
    dataset_paths: dict[Path, list[str]] = {}
    scene_template: ast.Call | None = None
    for path in _sources_that_register(package):
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = _read_class(node, path)
            elif isinstance(node, ast.For):
                scene_template = next(_calls(node, "register_env"), scene_template)
        if "scene_builder" in path.parts:
            dataset_paths[path] = re.findall(r"scene_datasets/[\w./-]+", path.read_text(encoding="utf-8"))

    agents = {cls.uid: cls for cls in classes.values() if cls.uid}
    builders = {cls.builds_scene: cls for cls in classes.values() if cls.builds_scene}

    def assets_of(cls: _Class, scene: str | None) -> tuple[str, ...]:
        lineage = list(_lineage(cls, classes))
        found = [asset for base in lineage for asset in base.assets]
        for robot in next((base.robots for base in lineage if base.robots), []):
            if agent := agents.get(robot) or classes.get(robot):
                found += [asset for base in _lineage(agent, classes) for asset in base.assets]
        scene = scene or next((base.scene_builder for base in lineage if base.scene_builder), None)
        if scene in builders:
            lineage = list(_lineage(builders[scene], classes))
            paths = [path for base in lineage for path in dataset_paths.get(base.file, [])]
            found += _scene_datasets(paths, sources)
        return tuple(dict.fromkeys(found))

    entries = [
        MsEntry(env_id, steps, assets_of(cls, None))
        for cls in classes.values()
        for env_id, steps in cls.env_ids.items()
    ]
    if scene_template is not None and scene_template.args:
        # envs/scenes/__init__.py registers one env for each scene builder, in a loop, under f"{name}_...".
        suffix = "".join(_texts(scene_template.args[0]))
        steps = _keyword(scene_template, "max_episode_steps")
        manipulation = classes["SceneManipulationEnv"]
        entries += [MsEntry(name + suffix, steps, assets_of(manipulation, name)) for name in builders if name]
    return {entry.id: entry for entry in sorted(entries, key=lambda entry: entry.id)}


def _sources_that_register(package: Path) -> list[Path]:
    """The files with a registered class, and their neighbours, where its base classes are."""
    paths = sorted(path for folder in MANISKILL_FOLDERS for path in (package / folder).rglob("*.py"))
    folders = {path.parent for path in paths if b"@register_" in path.read_bytes()}
    return [path for path in paths if path.parent in folders or path.parent.name == "scenes"]


def _read_class(node: ast.ClassDef, path: Path) -> _Class:
    cls = _Class(node.name, path, [base.id for base in node.bases if isinstance(base, ast.Name)])
    for decorator in node.decorator_list:
        for call in _calls(decorator, "register_env"):
            cls.env_ids[ast.literal_eval(call.args[0])] = _keyword(call, "max_episode_steps")
            cls.assets += _keyword(call, "asset_download_ids") or []
        for call in _calls(decorator, "register_agent"):
            cls.assets += _keyword(call, "asset_download_ids") or []
        for call in _calls(decorator, "register_scene_builder"):
            cls.builds_scene = ast.literal_eval(call.args[0])
    for statement in node.body:
        if isinstance(statement, ast.Assign) and _is_text(statement.value):
            if any(isinstance(target, ast.Name) and target.id == "uid" for target in statement.targets):
                cls.uid = ast.literal_eval(statement.value)
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            cls.robots = _default_robots(statement)
            scene = _argument_default(statement, "scene_builder_cls")
            cls.scene_builder = ast.literal_eval(scene) if scene and _is_text(scene) else None
    return cls


def _default_robots(init: ast.FunctionDef) -> list[str]:
    """What a constructor passes on as robots: its argument's default, a constant, or a class it chooses."""
    default = _argument_default(init, "robot_uids")
    if default is not None:
        return _names(default)
    for call in _calls(init, "__init__"):
        for keyword in call.keywords:
            if keyword.arg == "robot_uids":
                chosen = {
                    target.id: statement.value
                    for statement in ast.walk(init)
                    if isinstance(statement, ast.Assign)
                    for target in statement.targets
                    if isinstance(target, ast.Name)
                }
                value = keyword.value
                return _names(chosen.get(value.id, value) if isinstance(value, ast.Name) else value)
    return []


def _argument_default(init: ast.FunctionDef, name: str) -> ast.expr | None:
    positional = [*init.args.posonlyargs, *init.args.args]
    with_defaults = zip(positional[::-1], init.args.defaults[::-1], strict=False)
    pairs = [*with_defaults, *zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)]
    return next((default for argument, default in pairs if argument.arg == name), None)


def _names(value: ast.expr) -> list[str]:
    """Texts and names in an expression: "panda" -> panda, AntRobot -> AntRobot; those of all in a tuple."""
    return [*_texts(value), *(node.id for node in ast.walk(value) if isinstance(node, ast.Name))]


def _lineage(cls: _Class, classes: dict[str, _Class]) -> Iterator[_Class]:
    """The class and its ancestors within the package, nearest first."""
    yield cls
    for base in cls.bases:
        if base in classes and base != cls.name:
            yield from _lineage(classes[base], classes)


def _calls(node: ast.AST, function: str) -> Iterator[ast.Call]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and function in (
            getattr(inner.func, "id", ""),
            getattr(inner.func, "attr", ""),
        ):
            yield inner


def _keyword(call: ast.Call, name: str) -> Any:
    return next((ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg == name), None)


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _texts(node: ast.AST) -> list[str]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


# --- assets -------------------------------------------------------------------------------------------------


@functools.cache
def _read_assets(package: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Paths below the asset root: of each data source, and of all members of each data group."""
    tree = ast.parse((package / "utils/assets/data.py").read_bytes())
    sources: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)):
            continue
        target = node.targets[0]
        table, key = getattr(target.value, "id", ""), target.slice
        if table == "DATA_SOURCES" and _is_text(key) and isinstance(node.value, ast.Call):
            sources[ast.literal_eval(key)] = _keyword(node.value, "target_path")
        elif table == "DATA_GROUPS" and _is_text(key):
            # PartNet-Mobility objects, as category_uids["cabinet_door"] + ...; their ids lie in JSON files.
            models = {m for category in _texts(node.value) for m in _partnet_models(package, category)}
            groups[ast.literal_eval(key)] = [f"partnet_mobility/dataset/{model}" for model in sorted(models)]
    return sources, groups


def _partnet_models(package: Path, category: str) -> list[str]:
    listing = package / f"assets/partnet_mobility/meta/info_{category}_train.json"
    return list(json.loads(listing.read_text(encoding="utf-8"))) if listing.exists() else []


def _scene_datasets(paths: list[str], sources: dict[str, str]) -> list[str]:
    """The data sources that hold the given paths, the innermost one for each path.

    Outer ones first: a download empties its folder before it fills it.
    """
    found = set()
    for path in paths:
        holders = [asset for asset, target in sources.items() if f"{path}/".startswith(f"{target}/")]
        if holders:
            found.add(max(holders, key=lambda asset: len(sources[asset])))
    return sorted(found, key=lambda asset: len(sources[asset]))
