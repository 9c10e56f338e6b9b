"""The folder of a result: new each time, and known to be writable before anything is measured."""

from pathlib import Path

import pytest

from embodied_rl import result_folder as module
from embodied_rl.faults import Fault
from embodied_rl.result_folder import removed_if_empty, result_folder


def test_a_default_folder_that_exists_gets_a_number(tmp_path: Path) -> None:
    default = tmp_path / "evaluations" / "mine"
    found = [result_folder(None, default) for _ in range(3)]
    assert found == [(default, []), (default.with_name("mine-2"), []), (default.with_name("mine-3"), [])]
    assert all(folder.is_dir() for folder, _ in found)


def test_two_evaluations_that_begin_together_do_not_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = tmp_path / "mine"

    def meanwhile(directory: Path, key: str, hint: str) -> None:
        default.mkdir(exist_ok=True)

    monkeypatch.setattr(module, "unwritable", meanwhile)
    assert result_folder(None, default) == (tmp_path / "mine-2", [])


def test_a_folder_that_the_user_names_is_new_or_empty(tmp_path: Path) -> None:
    assert result_folder(tmp_path / "a", tmp_path / "default") == (tmp_path / "a", [])
    assert result_folder(tmp_path / "a", tmp_path / "default") == (tmp_path / "a", [])
    (tmp_path / "a" / "result.json").write_text("{}")
    _, (fault,) = result_folder(tmp_path / "a", tmp_path / "default")
    assert (fault.key, fault.problem) == ("--out", "is not empty")
    assert not (tmp_path / "default").exists()


@pytest.mark.parametrize("out", ["/proc/x", "file/x"])
def test_what_cannot_be_written_is_a_fault_beside_the_others_and_leaves_nothing(out: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    other = Fault("seed", -1, "wrong")
    _, faults = result_folder(tmp_path / out, tmp_path / "default", [other])
    assert faults[0] == other and faults[1].key == "--out" and "cannot be written" in faults[1].problem
    assert result_folder(None, tmp_path / "default", [other])[1] == [other]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_in_which_nothing_was_left_goes_again(tmp_path: Path) -> None:
    for name in ("empty", "full"):
        folder, _ = result_folder(None, tmp_path / name)
        with pytest.raises(KeyboardInterrupt), removed_if_empty(folder):
            if name == "full":
                (folder / "result.json").write_text("{}")
            raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
