"""Checkpoints: whole or absent, exact, and checked before use."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.checkpoint import (
    best_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    mark_best,
    problems,
    read_manifest,
    save_checkpoint,
)

CONFIG = {"seed": 3, "env": {"id": "PushCube-v1"}}


def parts() -> dict[str, Any]:
    weight = torch.arange(6.0).reshape(2, 3)
    model = torch.nn.Linear(2, 2)
    optimiser = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimiser.step()
    return {
        "policy": {"w": weight, "transposed": weight.T, "tied": weight, "view": weight[0]},
        "optimiser": optimiser.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "count": 5},
    }


def save(run: Path, step: int, keep: int = 3) -> Path:
    return save_checkpoint(run, step, {"policy": {"w": torch.full((3,), float(step))}}, {"step": step}, CONFIG, keep)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_what_was_saved_comes_back_exactly(tmp_path: Path) -> None:
    content = parts()
    state = {
        "cursor": [1, [2, 3]],
        "float": 0.1 + 0.2,
        "tiny": 5e-324,
        "big": 2**127 + 1,
        "none": None,
        "yes": True,
    }
    path = save_checkpoint(tmp_path, 123, content, state, CONFIG, keep=1)
    assert path == tmp_path / "checkpoints/step_000123"
    assert problems(path) == []
    loaded = load_checkpoint(path)
    assert (loaded.step, loaded.state, loaded.config) == (123, state, CONFIG)
    assert set(loaded.parts) == {"policy", "optimiser", "rng"}
    for name, tensor in content["policy"].items():
        assert torch.equal(loaded.parts["policy"][name], tensor)
    torch.testing.assert_close(loaded.parts["optimiser"], content["optimiser"], rtol=0, atol=0)
    assert torch.equal(loaded.parts["rng"]["torch"], content["rng"]["torch"])


def test_the_manifest_lists_every_file_and_the_configuration(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, parts(), {}, CONFIG, keep=1)
    manifest = read_manifest(path)
    assert (manifest.step, manifest.config) == (1, CONFIG)
    assert {*manifest.files, "manifest.json"} == {file.name for file in path.iterdir()}
    assert manifest.files["policy.safetensors"].size == (path / "policy.safetensors").stat().st_size


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step_000010", "step_000011"]
    assert latest_checkpoint(tmp_path) == (tmp_path / "checkpoints/step_000011", [])


def test_a_damaged_newer_checkpoint_never_costs_the_sound_one(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 30) / "state.json").unlink()
    sound = save(tmp_path, 20, keep=1)
    assert latest_checkpoint(tmp_path)[0] == sound


def test_steps_beyond_six_digits_are_in_order(tmp_path: Path) -> None:
    save(tmp_path, 999_999)
    newest = save(tmp_path, 1_000_000)
    assert latest_checkpoint(tmp_path)[0] == newest


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 5)
    path = save_checkpoint(tmp_path, 5, {}, {"again": True}, CONFIG, keep=2)
    assert load_checkpoint(path).state == {"again": True}
    assert names(tmp_path) == ["step_000005"]


def test_what_a_killed_save_left_is_no_checkpoint_and_is_removed_by_the_next(tmp_path: Path) -> None:
    sound = save(tmp_path, 1)
    partial = tmp_path / "checkpoints/.step_000002.tmp"
    partial.mkdir()
    (partial / "policy.safetensors").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) == (sound, [])
    save(tmp_path, 2)
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_a_process_killed_while_saving_leaves_the_last_sound_checkpoint(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from embodied_rl.checkpoint import save_checkpoint\n"
        "for step in range(10**6):\n"
        "    weights = {'w': torch.full((500_000,), float(step))}\n"
        "    save_checkpoint(Path(sys.argv[1]), step, {'policy': weights}, {}, {}, keep=2)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    deadline = time.monotonic() + 60
    try:
        while not any(path.name > "step_000002" for path in (tmp_path / "checkpoints").glob("step_*")):
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.005)
    finally:
        child.kill()
        child.wait()
    path, skipped = latest_checkpoint(tmp_path)
    assert path is not None and skipped == []
    loaded = load_checkpoint(path)
    assert torch.equal(loaded.parts["policy"]["w"], torch.full((500_000,), float(loaded.step)))


def damage_missing(path: Path) -> None:
    (path / "policy.safetensors").unlink()


def damage_one_byte(path: Path) -> None:
    data = bytearray((path / "policy.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "policy.safetensors").write_bytes(data)


def damage_cut_short(path: Path) -> None:
    data = (path / "policy.safetensors").read_bytes()
    (path / "policy.safetensors").write_bytes(data[:-4])


def damage_no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"format": "embodied-rl", ')


def make_foreign(path: Path) -> None:
    (path / "manifest.json").write_text('{"weights": "model.bin"}')


def make_newer(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))


def make_escaping(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../other"] = manifest["files"]["state.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, "policy.safetensors is missing"),
        (damage_one_byte, "policy.safetensors is damaged"),
        (damage_cut_short, "bytes instead of"),
        (damage_no_manifest, "no manifest.json"),
        (damage_manifest, "manifest.json is damaged"),
        (make_foreign, "not a checkpoint of embodied-rl"),
        (make_newer, "format version 2, and this version reads 1"),
        (make_escaping, "outside the checkpoint"),
    ],
)
def test_a_damaged_or_foreign_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, damage: Any, message: str
) -> None:
    sound, damaged = save(tmp_path, 1), save(tmp_path, 2)
    damage(damaged)
    assert any(message in problem for problem in problems(damaged)), problems(damaged)
    with pytest.raises(ValueError, match="step_000002 cannot be loaded"):
        load_checkpoint(damaged)
    path, (warning,) = latest_checkpoint(tmp_path)
    assert path == sound
    assert str(damaged) in warning and message in warning


def test_a_run_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) == (None, [])
    assert problems(tmp_path / "none") == ["no such directory"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"cursors": {1: 2}}, "state.cursors has the key 1"),
        ({"pair": [(1, 2)]}, r"state.pair\[0\] is a tuple"),
        ({"tensor": torch.ones(1)}, "state.tensor is a Tensor"),
    ],
)
def test_state_that_json_would_change_is_refused(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        save_checkpoint(tmp_path, 1, {}, state, CONFIG, keep=1)
    assert latest_checkpoint(tmp_path) == (None, [])


def test_infinite_and_missing_numbers_in_the_state_survive(tmp_path: Path) -> None:
    state = load_checkpoint(save_checkpoint(tmp_path, 1, {}, {"a": math.inf, "b": math.nan}, CONFIG, 1)).state
    assert state["a"] == math.inf and math.isnan(state["b"])


def test_a_part_that_could_not_be_loaded_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="part 'actor' could not be loaded again with weights_only=True"):
        save_checkpoint(tmp_path, 1, {"actor": {"path": Path("x")}}, {}, CONFIG, keep=1)
    assert latest_checkpoint(tmp_path) == (None, [])


def test_looking_at_a_checkpoint_does_not_import_torch(tmp_path: Path) -> None:
    save(tmp_path, 1)
    code = (
        "import sys; from pathlib import Path; from embodied_rl.checkpoint import latest_checkpoint;"
        "print(latest_checkpoint(Path(sys.argv[1]))[0].name, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["step_000001", "False"]


def test_the_checkpoint_marked_as_best_outlives_newer_ones(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep=1)
        if step == 2:
            mark_best(tmp_path, 2)
    assert names(tmp_path) == ["best", "step_000002", "step_000005"]
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoints/step_000002"


def test_the_mark_moves_and_goes(tmp_path: Path) -> None:
    assert best_checkpoint(tmp_path) is None
    for step in (1, 2):
        mark_best(tmp_path, int(save(tmp_path, step).name.removeprefix("step_")))
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoints/step_000002"
    mark_best(tmp_path, None)
    assert best_checkpoint(tmp_path) is None
