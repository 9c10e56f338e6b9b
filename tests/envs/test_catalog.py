"""What is read from ManiSkill's sources, against what was found by making every env of version 3.0.1."""

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from envs.catalog import asset_root, download_command, gymnasium_envs, maniskill_envs, missing_assets

pytestmark = pytest.mark.skipif(find_spec("mani_skill") is None, reason="reads the installed ManiSkill")

# Env -> the assets without which making it fails.
NEEDS = {
    "AnymalC-Reach-v1": ["anymal_c"],
    "AnymalC-Spin-v1": ["anymal_c"],
    "ArchitecTHOR_SceneManipulation-v1": ["AI2THOR"],
    "AssemblingKits-v1": ["assembling_kits"],
    "InsertFlower-v1": ["oakink-v2"],
    "OpenCabinetDoor-v1": ["partnet_mobility_cabinet"],
    "OpenCabinetDrawer-v1": ["partnet_mobility_cabinet"],
    "PickClutterYCB-v1": ["ycb", "pick_clutter_ycb_configs"],
    "PickCubeWidowXAI-v1": ["widowxai"],
    "PickSingleYCB-v1": ["ycb"],
    "PutCarrotOnPlateInScene-v1": ["bridge_v2_real2sim", "widowx250s"],
    "PutEggplantInBasketScene-v1": ["bridge_v2_real2sim", "widowx250s"],
    "PutSpoonOnTableClothInScene-v1": ["bridge_v2_real2sim", "widowx250s"],
    "ReplicaCADPrepareGroceriesTrain_SceneManipulation-v1": ["ReplicaCAD", "ReplicaCADRearrange"],
    "ReplicaCADPrepareGroceriesVal_SceneManipulation-v1": ["ReplicaCAD", "ReplicaCADRearrange"],
    "ReplicaCADSetTableTrain_SceneManipulation-v1": ["ReplicaCAD", "ReplicaCADRearrange"],
    "ReplicaCADSetTableVal_SceneManipulation-v1": ["ReplicaCAD", "ReplicaCADRearrange"],
    "ReplicaCADTidyHouseTrain_SceneManipulation-v1": ["ReplicaCAD", "ReplicaCADRearrange"],
    "ReplicaCADTidyHouseVal_SceneManipulation-v1": ["ReplicaCAD", "ReplicaCADRearrange"],
    "ReplicaCAD_SceneManipulation-v1": ["ReplicaCAD"],
    "RoboCasaKitchen-v1": ["RoboCasa"],
    "RotateSingleObjectInHandLevel2-v1": ["ycb"],
    "RotateSingleObjectInHandLevel3-v1": ["ycb"],
    "SceneManipulation-v1": ["ReplicaCAD"],
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1": ["bridge_v2_real2sim", "widowx250s"],
    "TurnFaucet-v1": ["partnet_mobility_faucet"],
    "UnitreeGo2-Reach-v1": ["unitree_go2"],
    "UnitreeH1Stand-v1": ["unitree_h1"],
}
WORK_OFFLINE = [
    "DrawTriangle-v1",
    "Empty-v1",
    "FMBAssembly1Easy-v1",
    "LiftPegUpright-v1",
    "MS-AntRun-v1",
    "MS-AntWalk-v1",
    "MS-CartpoleBalance-v1",
    "MS-CartpoleSwingUp-v1",
    "MS-HopperHop-v1",
    "MS-HopperStand-v1",
    "MS-HumanoidRun-v1",
    "MS-HumanoidStand-v1",
    "MS-HumanoidWalk-v1",
    "PegInsertionSide-v1",
    "PickCube-v1",
    "PickCubeSO100-v1",
    "PlaceSphere-v1",
    "PlugCharger-v1",
    "PokeCube-v1",
    "PullCube-v1",
    "PullCubeTool-v1",
    "PushCube-v1",
    "PushT-v1",
    "RollBall-v1",
    "RotateSingleObjectInHandLevel0-v1",
    "RotateSingleObjectInHandLevel1-v1",
    "RotateValveLevel0-v1",
    "RotateValveLevel1-v1",
    "RotateValveLevel2-v1",
    "RotateValveLevel3-v1",
    "RotateValveLevel4-v1",
    "SO100GraspCube-v1",
    "StackCube-v1",
    "StackPyramid-v1",
    "TableTopFreeDraw-v1",
    "TriFingerRotateCubeLevel0-v1",
    "TriFingerRotateCubeLevel1-v1",
    "TriFingerRotateCubeLevel2-v1",
    "TriFingerRotateCubeLevel3-v1",
    "TriFingerRotateCubeLevel4-v1",
    "TwoRobotPickCube-v1",
    "TwoRobotStackCube-v1",
    "UnitreeG1PlaceAppleInBowl-v1",
    "UnitreeG1Stand-v1",
    "UnitreeG1TransportBox-v1",
]


@pytest.fixture
def no_assets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path))
    return tmp_path / "data"


def test_every_registered_env_is_found_and_no_other() -> None:
    # DrawSVG needs a Python package, not an asset.
    assert set(maniskill_envs()) == {*NEEDS, *WORK_OFFLINE, "DrawSVG-v1"}


@pytest.mark.parametrize("env_id", NEEDS)
def test_an_env_that_cannot_be_made_offline_names_its_assets(env_id: str, no_assets: Path) -> None:
    assert missing_assets(env_id) == NEEDS[env_id]


@pytest.mark.parametrize("env_id", WORK_OFFLINE)
def test_an_env_that_works_offline_misses_nothing(env_id: str, no_assets: Path) -> None:
    assert missing_assets(env_id) == []


def test_a_downloaded_asset_is_not_missing(no_assets: Path) -> None:
    (no_assets / "assets/mani_skill2_ycb").mkdir(parents=True)
    assert missing_assets("PickSingleYCB-v1") == []
    assert missing_assets("PickClutterYCB-v1") == ["pick_clutter_ycb_configs"]


def test_a_group_of_assets_is_missing_while_one_of_its_members_is(no_assets: Path) -> None:
    assert missing_assets("TurnFaucet-v1") == ["partnet_mobility_faucet"]
    for model in _faucet_models():
        assert missing_assets("TurnFaucet-v1"), "found before the last member was there"
        (no_assets / "partnet_mobility/dataset" / model).mkdir(parents=True)
    assert missing_assets("TurnFaucet-v1") == []


def _faucet_models() -> list[str]:
    spec = find_spec("mani_skill")
    assert spec is not None and spec.origin is not None
    listing = Path(spec.origin).parent / "assets/partnet_mobility/meta/info_faucet_train.json"
    return sorted(json.loads(listing.read_text()))


@pytest.mark.parametrize(
    ("env_id", "steps"),
    [("PushCube-v1", 50), ("Empty-v1", 200000), ("ReplicaCAD_SceneManipulation-v1", 200), ("PushT-v1", 100)],
)
def test_episode_lengths_are_read(env_id: str, steps: int) -> None:
    assert maniskill_envs()[env_id].max_episode_steps == steps


def test_the_asset_folder_is_maniskills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MS_ASSET_DIR", raising=False)
    assert asset_root() == Path.home() / ".maniskill/data"
    one, two = (f"python -m mani_skill.utils.download_asset -y {asset}" for asset in ("ycb", "AI2THOR"))
    assert download_command(["ycb", "AI2THOR"]) == f"{one} && {two}"


def test_reading_the_catalog_imports_no_simulator() -> None:
    code = (
        "import sys; from envs.catalog import *;"
        "maniskill_envs(); missing_assets('PushCube-v1'); gymnasium_envs();"
        "print(sorted({'mani_skill', 'sapien', 'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_envs_of_maniskill_are_not_gymnasiums_even_when_it_is_imported() -> None:
    importlib.import_module("mani_skill.envs")
    assert "PushCube-v1" not in gymnasium_envs()
    assert "CartPole-v1" in gymnasium_envs()


def test_gymnasium_envs_say_which_module_they_need() -> None:
    envs = gymnasium_envs()
    assert envs["CartPole-v1"].max_episode_steps == 500
    assert envs["CartPole-v1"].needs is None
    assert envs["Ant-v5"].needs == "mujoco"
    assert envs["LunarLander-v3"].needs == "Box2D"
