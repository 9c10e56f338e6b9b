"""Datasets of demonstrations: what is written is read, whatever happened in between."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.demonstrations import (
    DatasetError,
    Demonstrations,
    DemonstrationWriter,
    EpisodeInfo,
    Trajectory,
    statistics,
)

SETTINGS = {"env": {"id": "PushCube-v1", "horizon": 12}, "image_format": "png", "gripper": 2, "seed": 0}
LENGTHS = {0: 4, 2: 6, 3: 1}  # number 1 failed


def trajectory(number: int, length: int, images: bool = True) -> Trajectory:
    generator = np.random.default_rng(number)
    return Trajectory(
        action=generator.uniform(-1, 1, (length, 3)).astype(np.float32),
        executed_action=generator.uniform(-1, 1, (length, 3)).astype(np.float32),
        state=generator.normal(size=(length + 1, 5)).astype(np.float32),
        image=generator.integers(0, 256, (length + 1, 2, 8, 6, 3), np.uint8) if images else None,
    )


def info(number: int, length: int, success: bool = True) -> EpisodeInfo:
    return EpisodeInfo(number, 100 + number, length, success, 1.5, f"task {number}", kept=success)


def write(path: Path, numbers: dict[int, int] = LENGTHS, settings: dict[str, Any] = SETTINGS, **options: bool) -> None:
    with DemonstrationWriter(path, settings) as writer:
        writer.index(info(1, 3, success=False))
        for number, length in numbers.items():
            writer.write(number, trajectory(number, length, **options))
            writer.index(info(number, length))
        writer.complete()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    write(tmp_path / "data")
    return tmp_path / "data"


def assert_same(one: Trajectory, other: Trajectory) -> None:
    for name, array in vars(one).items():
        np.testing.assert_array_equal(array, getattr(other, name))


def test_episodes_come_back_as_they_were(dataset: Path) -> None:
    read = Demonstrations(dataset)
    assert len(read) == 3 and read.num_steps == 11 and read.settings == SETTINGS
    assert read.episodes == [info(number, length) for number, length in LENGTHS.items()]
    for episode, (number, length) in enumerate(LENGTHS.items()):
        assert_same(read.trajectory(episode), trajectory(number, length))


def test_batch_holds_what_the_expert_saw_and_did_next(dataset: Path) -> None:
    observation, actions, valid = Demonstrations(dataset).batch([8, 0, 10], chunk=3)
    middle, first, last = trajectory(2, 6), trajectory(0, 4), trajectory(3, 1)
    assert observation["instruction"] == ["task 2", "task 0", "task 3"]
    np.testing.assert_array_equal(observation["state"], [middle.state[4], first.state[0], last.state[0]])
    np.testing.assert_array_equal(observation["image"], [middle.image[4], first.image[0], last.image[0]])
    assert valid.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    np.testing.assert_array_equal(actions[0], [*middle.action[4:], np.zeros(3)])
    np.testing.assert_array_equal(actions[1], first.action[:3])
    np.testing.assert_array_equal(actions[2], [last.action[0], np.zeros(3), np.zeros(3)])


def test_every_step_is_reached_once(dataset: Path) -> None:
    read = Demonstrations(dataset)
    _, actions, _ = read.batch(range(read.num_steps))
    expected = np.concatenate([trajectory(number, length).action for number, length in LENGTHS.items()])
    np.testing.assert_array_equal(actions[:, 0], expected)
    for beyond in (-1, read.num_steps):
        with pytest.raises(IndexError, match=f"no step {beyond}; the dataset has 11"):
            read.batch([beyond])


def test_jpeg_is_smaller_and_close(tmp_path: Path) -> None:
    y, x = np.mgrid[:64, :64]
    grain = np.random.default_rng(0).integers(0, 6, (64, 64, 1))
    scene = (np.stack([x * 3, y * 3, x + y], -1) + grain).astype(np.uint8)
    sizes = {}
    for encoding in ("png", "jpeg"):
        one = Trajectory(np.zeros((1, 3), np.float32), np.zeros((1, 3), np.float32), None, scene[None, None][[0, 0]])
        with DemonstrationWriter(tmp_path / encoding, {**SETTINGS, "image_format": encoding}) as writer:
            writer.write(0, one)
            writer.index(info(0, 1))
            writer.complete()
        image = Demonstrations(tmp_path / encoding).trajectory(0).image
        assert image is not None
        assert np.abs(image.astype(int) - scene).mean() < (3 if encoding == "jpeg" else 1e-9)
        sizes[encoding] = (tmp_path / encoding / "episodes/000000.npz").stat().st_size
    assert sizes["jpeg"] < sizes["png"]


def test_dataset_without_images_has_none(tmp_path: Path) -> None:
    write(tmp_path / "data", images=False)
    read = Demonstrations(tmp_path / "data")
    assert read.trajectory(0).image is None
    assert "image" not in read.batch([0])[0]


def test_statistics_are_numpy_s_in_openvla_s_form(dataset: Path) -> None:
    found = json.loads((dataset / "dataset_statistics.json").read_text())
    assert list(found) == ["PushCube-v1"] and Demonstrations(dataset).statistics == found["PushCube-v1"]
    found = found["PushCube-v1"]
    assert found["num_transitions"] == 11 and found["num_trajectories"] == 3
    assert found["action"]["mask"] == [True, True, False]  # the gripper is not scaled
    episodes = [trajectory(number, length) for number, length in LENGTHS.items()]
    arrays = {
        "action": np.concatenate([episode.action for episode in episodes]),
        "proprio": np.concatenate([episode.state[:-1] for episode in episodes]),
    }
    for key, values in arrays.items():
        expected = {
            "mean": np.mean(values, 0),
            "std": np.std(values, 0),
            "min": np.min(values, 0),
            "max": np.max(values, 0),
            "q01": np.quantile(values, 0.01, axis=0),
            "q99": np.quantile(values, 0.99, axis=0),
        }
        assert set(found[key]) - {"mask"} == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(found[key][name], value, rtol=1e-5, atol=1e-7)


def test_statistics_by_hand() -> None:
    found = statistics(np.arange(101, dtype=np.float32)[:, None])
    by_hand = {"mean": 50, "std": 850**0.5, "min": 0, "max": 100, "q01": 1, "q99": 99}
    assert {name: values[0] for name, values in found.items()} == pytest.approx(by_hand)


# --- going on ------------------------------------------------------------------------------------------------


def test_writer_goes_on_after_the_last_whole_line(dataset: Path) -> None:
    index = dataset / "episodes.jsonl"
    index.write_bytes(index.read_bytes() + b'{"number": 4, "se')
    with DemonstrationWriter(dataset, SETTINGS) as writer:
        assert sorted(writer.episodes) == [0, 1, 2, 3] and writer.kept == 3
        writer.write(4, trajectory(4, 2))
        writer.index(info(4, 2))
        writer.complete()
    read = Demonstrations(dataset)
    assert [info.number for info in read.episodes] == [0, 2, 3, 4]
    assert read.statistics["num_transitions"] == 13


def test_file_of_an_episode_that_is_not_in_the_index_does_not_count(dataset: Path) -> None:
    with DemonstrationWriter(dataset, SETTINGS) as writer:
        writer.write(4, trajectory(4, 2))
    assert len(Demonstrations(dataset)) == 3


def test_dataset_is_incomplete_until_its_statistics_are_right_again(dataset: Path) -> None:
    with DemonstrationWriter(dataset, SETTINGS) as writer:
        writer.write(4, trajectory(4, 2))
        writer.index(info(4, 2))
    with pytest.raises(DatasetError, match=r"was not completed \(4 episodes so far\); go on with .* --resume"):
        Demonstrations(dataset)


def test_other_settings_are_refused_by_name(dataset: Path) -> None:
    with pytest.raises(DatasetError, match="env.horizon was 12, not 50; seed was 0, not 1"):
        DemonstrationWriter(dataset, {**SETTINGS, "env": {"id": "PushCube-v1", "horizon": 50}, "seed": 1})


def test_two_writers_at_once_are_refused(dataset: Path) -> None:
    with DemonstrationWriter(dataset, SETTINGS), pytest.raises(DatasetError, match="another process is writing"):
        DemonstrationWriter(dataset, SETTINGS)
    with DemonstrationWriter(dataset, SETTINGS):
        pass


# --- what is not a dataset -----------------------------------------------------------------------------------


def test_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DatasetError, match="holds something else"):
        DemonstrationWriter(tmp_path, SETTINGS)
    with pytest.raises(DatasetError, match="no dataset.json"):
        Demonstrations(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"version": 2}, "version 2; this version reads"), ({"format": "zarr"}, "another format"), (None, "is damaged")],
)
def test_dataset_of_another_format_is_refused(dataset: Path, change: dict[str, Any] | None, said: str) -> None:
    file = dataset / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change) if change else "{")
    with pytest.raises(DatasetError, match=said):
        Demonstrations(dataset)


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_damaged_episode_is_refused_by_name(dataset: Path, damage: str) -> None:
    file = dataset / "episodes/000002.npz"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-100] if damage == "cut" else content)
    read = Demonstrations(dataset)
    assert_same(read.trajectory(0), trajectory(0, 4))
    with pytest.raises(DatasetError, match="000002.npz"):
        read.trajectory(1)


def test_damaged_index_is_refused(dataset: Path) -> None:
    (dataset / "episodes.jsonl").write_text('{"number": 0}\n')
    with pytest.raises(DatasetError, match="episodes.jsonl is damaged"):
        Demonstrations(dataset)
