"""Which directory a run gets."""

from pathlib import Path

import pytest

from embodied_rl.config import Config
from embodied_rl.runs import choose_run_dir, runs_in


def make_runs(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "config.yaml").touch()


def config(root: Path, name: str | None = None) -> Config:
    return Config(run_root=str(root), name=name)


@pytest.mark.parametrize(
    ("existing", "chosen"),
    [
        ([], "foo"),
        (["foo"], "foo-2"),
        (["foo", "foo-2", "foo-3"], "foo-4"),
        (["foo", "foo-10"], "foo-11"),
        (["foo", "foo-bar", "food-7", "foo-07"], "foo-2"),
        (["bar", "bar-2"], "foo"),
    ],
)
def test_a_new_run_is_called_after_its_recipe_with_the_next_suffix(
    tmp_path: Path, existing: list[str], chosen: str
) -> None:
    make_runs(tmp_path, *existing)
    assert choose_run_dir(config(tmp_path), "foo", resume=False) == (tmp_path / chosen, [])
    assert not (tmp_path / chosen).exists()


def test_an_empty_directory_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "foo").mkdir()
    assert choose_run_dir(config(tmp_path), "foo", resume=False) == (tmp_path / "foo", [])


def test_resuming_takes_the_highest_suffix(tmp_path: Path) -> None:
    make_runs(tmp_path, "foo", "foo-2", "foo-10", "foo-bar")
    assert choose_run_dir(config(tmp_path), "foo", resume=True) == (tmp_path / "foo-10", [])
    assert choose_run_dir(config(tmp_path), "bar", resume=True) == (tmp_path / "bar", [])


def test_a_given_name_is_never_given_a_suffix(tmp_path: Path) -> None:
    make_runs(tmp_path, "mine", "mine-2")
    path, (fault,) = choose_run_dir(config(tmp_path, "mine"), "foo", resume=False)
    assert (path, fault.key, fault.value) == (tmp_path / "mine", "name", "mine")
    assert "--resume" in fault.hint
    assert "mine-3" in fault.hint
    assert choose_run_dir(config(tmp_path, "mine"), "foo", resume=True) == (tmp_path / "mine", [])
    assert choose_run_dir(config(tmp_path, "new"), "foo", resume=False) == (tmp_path / "new", [])


def test_a_run_directory_that_is_named_is_the_one(tmp_path: Path) -> None:
    assert choose_run_dir(config(tmp_path), "foo", resume=f"{tmp_path}/old/") == (tmp_path / "old", [])


def test_runs_are_listed_if_they_have_checkpoints(tmp_path: Path) -> None:
    make_runs(tmp_path, "a", "b")
    (tmp_path / "b/checkpoints/step_000001").mkdir(parents=True)
    assert runs_in(tmp_path) == [tmp_path / "b"]
    assert runs_in(tmp_path / "none") == []
