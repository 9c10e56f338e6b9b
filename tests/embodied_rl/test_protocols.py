from pathlib import Path

import numpy as np
import pytest
import torch

from embodied_rl.protocols import PROTOCOLS, jpeg_round_trip
from policies.action_tokens import action_statistics, gripper_command

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "openvla"
SIZES = [(224, 224), (256, 256), (480, 640), (128, 96)]


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "tf_image.npz") as arrays, np.load(GOLDEN / "preprocess.npz") as raw:
        images = {key: raw[key] for key in raw.files if key.startswith("raw_")}
        return {**{key: arrays[key] for key in arrays.files}, **images}


def test_caps_are_those_of_the_reference_evaluation() -> None:
    caps = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
    assert PROTOCOLS["openvla-oft"].horizons == PROTOCOLS["openvla"].horizons == caps
    assert PROTOCOLS["lerobot"].horizons == {**caps, "libero_spatial": 280}
    assert set(PROTOCOLS["simplevla"].horizons.values()) == {512}


def test_presets_differ_in_what_the_publications_differ_in() -> None:
    counts = {name: (rule.settle_steps, rule.trials, rule.chunk, rule.temperature) for name, rule in PROTOCOLS.items()}
    assert counts == {
        "openvla-oft": (10, 50, 8, None),
        "openvla": (10, 50, 1, None),
        "simplevla": (10, 50, 8, None),
        "rlinf": (15, 50, 8, 1.6),
        "lerobot": (10, 10, 8, None),
    }
    assert all(rule.settle_action == (0, 0, 0, 0, 0, 0, -1) for rule in PROTOCOLS.values())


@pytest.mark.parametrize("size", SIZES)
def test_image_path_is_tensorflow_s_up_to_the_decoder_of_jpeg(
    golden: dict[str, np.ndarray], size: tuple[int, int]
) -> None:
    name = f"{size[0]}x{size[1]}"
    shown = PROTOCOLS["openvla-oft"].see(golden[f"raw_{name}"][None, None])
    assert shown.shape == (1, 1, 224, 224, 3)
    difference = np.abs(shown[0, 0].astype(int) - golden[f"jpeg_lanczos_crop_{name}"])
    assert difference.max() <= 16 and difference.mean() < 2  # the fast DCT; without the round trip it is far more


def test_image_path_without_jpeg_is_exact_within_one_level(golden: dict[str, np.ndarray]) -> None:
    import dataclasses

    rule = dataclasses.replace(PROTOCOLS["openvla-oft"], jpeg=False, center_crop=False)
    difference = np.abs(rule.see(golden["raw_256x256"][None, None])[0, 0].astype(int) - golden["lanczos_256x256"])
    assert difference.max() <= 1 and (difference > 0).mean() <= 1e-4


def test_protocols_without_an_image_path_show_what_the_env_gives(golden: dict[str, np.ndarray]) -> None:
    image = golden["raw_256x256"][None, None]
    assert PROTOCOLS["lerobot"].see(image) is image


def test_jpeg_round_trip_loses_little_and_keeps_the_shape(golden: dict[str, np.ndarray]) -> None:
    image = golden["raw_128x96"]
    there_and_back = jpeg_round_trip(image)
    assert there_and_back.shape == image.shape and there_and_back.dtype == np.uint8
    assert (there_and_back != image).any()


def test_gripper_at_one_half_neither_opens_nor_closes() -> None:
    action = torch.tensor([[0.0] * 6 + [opening] for opening in (0.0, 0.5, 1.0)])
    assert gripper_command(action, "libero")[:, 6].tolist() == [1.0, 0.0, -1.0]


def test_an_unmasked_gripper_is_not_brought_to_units() -> None:
    low, high = [-2.0] * 6 + [0.0], [2.0] * 6 + [1.0]
    stats = {"libero_goal_no_noops": {"action": {"q01": low, "q99": high, "mask": [True] * 6 + [False]}}}
    known = action_statistics(stats, "libero_goal")
    assert known.unnormalise(torch.full((7,), 0.5), 0.0).tolist() == [1.0] * 6 + [0.5]
