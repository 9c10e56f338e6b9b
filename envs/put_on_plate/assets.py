"""What the scenes on the Bridge table need that pip does not bring: names, sources, licences, commands."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from envs.catalog import absent_assets, download_command, maniskill_envs
from envs.put_on_plate.scenes import SCENES

BRIDGE = "bridge_v2_real2sim"
MANISKILLS = (
    "PutCarrotOnPlateInScene-v1",
    "PutEggplantInBasketScene-v1",
    "PutSpoonOnTableClothInScene-v1",
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1",
)
SCENE_ASSETS = (BRIDGE, "widowx250s")
MODELS = "assets/carrot/more_carrot/model_db.json"  # below the package of the scenes' classes
SOURCES = {
    BRIDGE: "table and models, 82 MB, Hugging Face haosulab/ManiSkill_bridge_v2_real2sim; ManiSkill's assets are "
    "licensed for non-commercial use, CC BY-NC 4.0",
    "widowx250s": "the robot, GitHub haosulab/ManiSkill-WidowX250S; licence: see there",
}
CLASSES = (
    "a module with the scene's class, as env.id=MODULE:ID (RLinf's: rlinf.envs.maniskill.tasks.variants; licence: "
    "Apache-2.0)"
)
CLASSES_COMMAND = "git clone https://github.com/RLinf/RLinf && pip install --no-deps -e RLinf"
CARROTS = "objects, plates and tables in assets/carrot (Hugging Face RLinf/maniskill_assets; licence: see there)"
CARROTS_COMMAND = "hf download --repo-type dataset RLinf/maniskill_assets --local-dir RLinf/rlinf/envs/maniskill/assets"


@dataclass(frozen=True)
class Lacking:
    """What is not on this machine, and the shell command that brings it."""

    what: tuple[str, ...]
    command: str

    def __str__(self) -> str:
        return "; ".join(self.what)


def is_bridge(env_id: str) -> bool:
    """Whether an env, by ID or MODULE:ID, is one of the scenes on the Bridge table."""
    return env_id.rpartition(":")[2] in (*SCENES, *MANISKILLS)


def lacking(env_id: str) -> Lacking | None:
    """What keeps an env of the Bridge table from being made here; None if nothing does, or for another env.

    `env_id` may be MODULE:ID. Nothing is imported.
    """
    if not is_bridge(env_id):
        return None
    module, _, name = env_id.rpartition(":")
    known = name in maniskill_envs()
    assets = absent_assets(SCENE_ASSETS)
    what, commands = [f"{asset} ({SOURCES[asset]})" for asset in assets], [download_command(assets)]
    if not known and not module:
        what.append(CLASSES)
        commands.append(CLASSES_COMMAND)
    if name in SCENES and not _has_models(module.partition(".")[0] or "mani_skill"):
        what.append(CARROTS)
        commands.append(CARROTS_COMMAND)
    return Lacking(tuple(what), " && ".join(filter(None, commands))) if what else None


def _has_models(package: str) -> bool:
    """Whether the objects lie where the classes in that package look for them."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return any(True for folder in folders or () for _ in Path(folder).rglob(MODELS))
