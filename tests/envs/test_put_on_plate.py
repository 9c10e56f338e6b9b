"""The put-on-plate scenes: numbers worked out by hand, and a stand-in for the published classes in the simulator."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from envs.base import EnvSettings, make
from envs.catalog import maniskill_envs
from envs.maniskill import ManiSkillEnv
from envs.put_on_plate import scoring
from envs.put_on_plate.assets import BRIDGE, MANISKILLS, is_bridge, lacking
from envs.put_on_plate.scenes import HORIZON, PREFIX, SCENES, grid, placements, ring
from envs.put_on_plate.scoring import Grasps, PotentialReward, contact_forces, on_plate

needs_maniskill = pytest.mark.skipif(find_spec("mani_skill") is None, reason="reads the installed ManiSkill")
MAIN = SCENES[f"{PREFIX}Main-v3"]


# ------------------------------------------------------------------------------------------ what there is


def test_the_published_evaluations_name_scenes_that_exist() -> None:
    named = (
        "VisionImage-v1 VisionTexture03-v1 VisionTexture05-v1 VisionWhole03-v1 VisionWhole05-v1 Carrot-v1 Plate-v1 "
        "Instruct-v1 MultiCarrot-v1 MultiPlate-v1 Position-v1 EEPose-v1 PositionChange-v1"
    )
    found = [PREFIX + name for name in named.split()]
    groups = [SCENES[env_id].group for env_id in found]
    assert groups == ["vision"] * 5 + ["semantic"] * 5 + ["execution"] * 3
    assert {scene.id for scene in SCENES.values() if scene.group == "training"}.isdisjoint(found)
    assert len(found) == len(SCENES) - 4 - 1  # PositionChangeTo-v1 is another name
    assert all(is_bridge(f"{module}{name}") for module in ("", "some.tasks:") for name in found)


def test_places_are_a_grid_of_three_centimetres_around_its_centre() -> None:
    places = grid()
    assert places.shape == (36, 2)
    np.testing.assert_allclose(
        places[[0, 1, 6, -1]], [[-0.235, -0.075], [-0.235, -0.045], [-0.205, -0.075], [-0.085, 0.075]]
    )
    np.testing.assert_allclose(places.mean(0), [-0.16, 0.0], atol=1e-12)


def test_object_and_plate_begin_apart() -> None:
    # of 36 * 35 ordered pairs those with offsets (1,0) (2,0) (1,1) (2,1) in cells are too near: 120 + 96 + 100 + 160
    pairs = placements(grid())
    assert pairs.shape == (36 * 35 - 476, 2, 2)
    assert np.linalg.norm(pairs[:, 0] - pairs[:, 1], axis=1).min() == pytest.approx(0.03 * 8**0.5)


def test_new_places_lie_around_the_grid() -> None:
    # a ring of 28; too near are 28 + 24 pairs along its sides and 3 across each corner, in both orders
    assert len(ring()) == 28 and len(placements(ring())) == 28 * 27 - 2 * (28 + 24 + 12)
    assert not {tuple(place) for place in ring().round(6)} & {tuple(place) for place in grid().round(6)}


# ------------------------------------------------------------------------------------------ episode ids


@pytest.mark.parametrize(
    ("obj_set", "count"),
    [("train", 16 * 16 * 784 * 4), ("test", 9 * 5 * 784 * 4), ("all", 25 * 21 * 784 * 4)],
)
def test_the_main_scene_counts_objects_tables_placements_and_yaws(obj_set: str, count: int) -> None:
    assert MAIN.num_episodes(obj_set) == count  # type: ignore[arg-type]


def test_an_episode_id_is_read_from_its_last_digit() -> None:
    things = {"object": 2, "plate": 0, "table": 3, "placement": 5, "yaw": 1}
    number = ((2 * 16 + 3) * 784 + 5) * 4 + 1
    assert MAIN.encode(things, "train") == number
    assert MAIN.decode(number, "train") == things
    assert MAIN.decode(number + MAIN.num_episodes("train"), "train") == things, "ids begin again"


def test_things_of_the_test_set_are_numbered_after_those_of_training() -> None:
    assert MAIN.decode(0, "test") == {"object": 16, "plate": 0, "table": 16, "placement": 0, "yaw": 0}
    last = MAIN.decode(MAIN.num_episodes("test") - 1, "test")
    assert last == {"object": 24, "plate": 0, "table": 20, "placement": 783, "yaw": 3}
    with pytest.raises(ValueError):
        MAIN.encode({**last, "object": 3}, "test")


def test_ids_of_many_episodes_are_read_at_once() -> None:
    ids = np.random.default_rng(0).integers(0, 10**9, 1000)
    things = MAIN.decode(ids, "all")
    np.testing.assert_array_equal(MAIN.encode(things, "all"), ids % MAIN.num_episodes("all"))


@pytest.mark.parametrize(
    ("name", "digit", "training", "test"),
    [
        ("Carrot-v1", "object", range(16), range(16, 25)),
        ("Plate-v1", "plate", range(1), range(1, 17)),
        ("VisionImage-v1", "table", range(16), range(16, 21)),
        ("VisionWhole05-v1", "texture", range(1), range(1, 17)),
        ("Instruct-v1", "phrase", range(1), range(1, 17)),
        ("Position-v1", "placement", range(784), range(784, 784 + 628)),
        ("Position-v1", "yaw", range(4), range(4, 8)),
        ("Position-v1", "object", range(16), range(16)),
    ],
)
def test_a_scene_varies_what_it_tests(name: str, digit: str, training: range, test: range) -> None:
    choice = SCENES[PREFIX + name].choices[digit]
    assert (choice.of("train"), choice.of("test")) == (training, test)


def test_a_scene_numbered_by_its_class_says_so() -> None:
    with pytest.raises(ValueError, match="MultiPlate-v1 are numbered by its class"):
        SCENES[f"{PREFIX}MultiPlate-v1"].num_episodes("train")
    with pytest.raises(ValueError, match="obj_set is 'tests', expected one of train, test, all"):
        MAIN.num_episodes("tests")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ success


def landed(**changed: list[float]) -> bool:
    """A cube of 4 cm in the middle of a plate of 20 x 14 x 2 cm, pressed with 0.2 N, but for what is changed."""
    state = {
        "object_at": [0.0, 0.0, 0.53],
        "plate_at": [0.0, 0.0, 0.5],
        "object_half": [0.02, 0.02, 0.02],
        "plate_half": [0.1, 0.07, 0.01],
        "force": [0.0, 0.0, 0.2],
        **changed,
    }
    return bool(on_plate(**{key: torch.tensor([value]) for key, value in state.items()}))


@pytest.mark.parametrize(
    ("changed", "success"),
    [
        ({}, True),
        ({"object_at": [0.0, 0.109, 0.53]}, True),  # the largest half-extent counts in every direction
        ({"object_at": [0.0, 0.111, 0.53]}, False),
        ({"object_at": [0.08, 0.08, 0.53]}, False),
        ({"object_at": [0.0, 0.0, 0.579]}, True),  # 4.9 cm above contact
        ({"object_at": [0.0, 0.0, 0.581]}, False),
        ({"object_at": [0.0, 0.0, 0.499]}, False),
        ({"force": [0.0, 0.0, 0.029]}, False),
        ({"force": [0.02, 0.02, 0.02]}, True),  # 0.035 N
    ],
)
def test_success_is_near_low_and_touching(changed: dict[str, list[float]], success: bool) -> None:
    assert landed(**changed) is success


def test_contacts_are_asked_for_once_for_each_pair_in_play() -> None:
    asked = []

    def query(thing: int, plate: int) -> torch.Tensor:
        asked.append((thing, plate))
        return torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.0, 0.0]) + 100 * thing + 10 * plate

    found = contact_forces(query, torch.tensor([3, 0, 3, 0, 3]), torch.tensor([0, 0, 0, 0, 1]))
    assert found[:, 0].tolist() == [300, 1, 302, 3, 314]
    assert sorted(asked) == [(0, 0), (3, 0), (3, 1)]


# ------------------------------------------------------------------------------------------ reward


def rewards(grasping: str, success: str) -> list[float]:
    """Of an episode of one env, from what happens at each step: 1 or 0."""
    grasps, reward = Grasps(1), PotentialReward(1)
    earned = []
    for grasped, succeeded in zip(grasping, success, strict=True):
        grasps.update(torch.tensor([grasped == "1"]))
        earned.append(float(reward.step(grasps.grasped, grasps.held, torch.tensor([succeeded == "1"]))))
    return [round(value, 6) for value in earned]


def test_grasp_hold_and_place_earn_one_after_another() -> None:
    assert rewards("0111110", "0000001") == [0, 0.1, 0, 0, 0, 0.1, 1]


def test_pushing_the_object_on_earns_nothing() -> None:
    assert rewards("000", "011") == [0, 0, 0]


def test_falling_off_costs_what_success_earned() -> None:
    assert rewards("1000", "0101") == [0.1, 1, -1, 1]


def test_a_grasp_that_was_broken_off_does_not_count_as_held() -> None:
    assert rewards("1111011110", "0" * 10) == [0.1] + [0] * 9
    assert sum(rewards("11110111110", "0" * 11)) == pytest.approx(0.2)


def test_success_before_the_first_grasp_is_paid_once_it_is_grasped() -> None:
    assert rewards("0010", "1111") == [0, 0, 1.1, 0]


def test_no_episode_earns_more_than_one_and_a_fifth() -> None:
    generator = torch.Generator().manual_seed(0)
    grasps, reward, total = Grasps(256), PotentialReward(256), torch.zeros(256)
    highest = total.clone()
    for _ in range(80):
        grasps.update(torch.rand(256, generator=generator) < 0.7)
        total += reward.step(grasps.grasped, grasps.held, torch.rand(256, generator=generator) < 0.5)
        highest = torch.maximum(highest, total)
    assert highest.max() == pytest.approx(1.2)


def test_envs_begin_new_episodes_apart_from_each_other() -> None:
    grasps, reward = Grasps(2), PotentialReward(2)
    for _ in range(scoring.HELD):
        grasps.update(torch.tensor([True, True]))
    reward.step(grasps.grasped, grasps.held, torch.tensor([True, True]))
    begun = torch.tensor([1])
    grasps.begin(begun)
    reward.begin(begun)
    grasps.update(torch.tensor([False, True]))
    assert (grasps.grasped.tolist(), grasps.held.tolist()) == ([True, True], [True, False])
    earned = reward.step(grasps.grasped, grasps.held, torch.tensor([True, False]))
    assert earned.tolist() == pytest.approx([0, 0.1])


# ------------------------------------------------------------------------------------------ assets


@pytest.fixture
def assets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path))
    return tmp_path / "data"


@needs_maniskill
def test_the_scenes_that_come_with_maniskill_are_those_that_need_the_bridge_assets() -> None:
    assert {env.id for env in maniskill_envs().values() if BRIDGE in env.assets} == set(MANISKILLS)
    assert all(map(is_bridge, MANISKILLS)) and is_bridge(f"foo.bar:{MAIN.id}") and not is_bridge("PushCube-v1")


@needs_maniskill
def test_what_is_lacking_is_named_with_source_licence_and_command(assets: Path) -> None:
    missing = lacking(MAIN.id)
    assert missing is not None
    for word in (
        "ManiSkill_bridge_v2_real2sim",
        "CC BY-NC 4.0",
        "WidowX250S",
        "env.id=MODULE:ID",
        "RLinf/maniskill_assets",
    ):
        assert word in str(missing)
    assert missing.command.startswith("python -m mani_skill.utils.download_asset -y bridge_v2_real2sim && ")
    own = lacking(MANISKILLS[0])
    assert own is not None and len(own.what) == 2 and "RLinf" not in own.command
    (assets / "tasks/bridge_v2_real2sim_dataset").mkdir(parents=True)
    (assets / "robots/widowx").mkdir(parents=True)
    assert lacking(MANISKILLS[0]) is None
    assert [part[:8] for part in lacking(MAIN.id).what] == ["a module", "objects,"]  # type: ignore[union-attr]


def test_knowing_the_scenes_imports_no_simulator() -> None:
    code = (
        "import sys; from envs.put_on_plate.assets import lacking; lacking('PutOnPlateInScene25Main-v3');"
        "print(sorted({'mani_skill', 'sapien', 'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------ in the simulator


@pytest.fixture
def stand_in(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ManiSkillEnv]:
    """A scene by MODULE:ID from a package with assets, as a published one is."""
    for folder in ("tasks/bridge_v2_real2sim_dataset", "robots/widowx"):
        (assets / folder).mkdir(parents=True)
    package = tmp_path / "foreign_scenes"
    (package / "assets/carrot/more_carrot").mkdir(parents=True)
    (package / "assets/carrot/more_carrot/model_db.json").touch()
    (package / "__init__.py").write_text("import plate_stand_in")
    monkeypatch.syspath_prepend(tmp_path)
    from mani_skill.utils import assets as sources

    for source in sources.DATA_SOURCES.values():  # what was imported before keeps the folder of then
        monkeypatch.setattr(source, "output_dir", assets)
    simulator = {"sim_freq": 50, "control_freq": 5, "object_set": "test"}
    env = make(EnvSettings("maniskill", f"foreign_scenes:{MAIN.id}", observation=("image",), simulator=simulator))
    yield env  # type: ignore[misc]
    env.close()
    import gymnasium
    from mani_skill.utils.registration import REGISTERED_ENVS

    for registry in (gymnasium.registry, REGISTERED_ENVS):
        del registry[MAIN.id]


@needs_maniskill
def test_a_scene_of_another_package_is_rewarded_and_instructed(stand_in: ManiSkillEnv) -> None:
    scene = stand_in._simulation._env
    assert (stand_in.horizon, stand_in.has_success) == (HORIZON, True)
    assert [task.instruction for task in stand_in.tasks][:2] == ["put carrot on plate", "put carrot on dish"]

    def play(steps: int, grasping: bool = False) -> tuple[float, bool]:
        scene.grasping = grasping
        done = [stand_in.step(np.zeros(stand_in.action.size, np.float32), observed=False) for _ in range(steps)]
        return round(sum(step.reward for step in done), 6), done[-1].success

    stand_in.reset(0, None)  # a seed is an episode id
    assert scene.obj_set == "test"
    assert play(5) == (0, True), "on the plate, but by no grasp"
    assert play(4, grasping=True) == (1.1, True)
    assert play(1, grasping=True) == (0.1, True)
    scene.grasping = False
    stand_in.reset(0, 7)
    assert stand_in.tasks[stand_in.task].instruction == "put pear on dish"
    assert play(5) == (0, False), "it fell beside the plate"
    assert play(5, grasping=True) == (0.2, False)
    assert stand_in.observe()["image"].shape == (1, 48, 64, 3)
