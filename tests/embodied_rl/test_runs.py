"""Which directory a run gets."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from embodied_rl.checkpoint import mark_best, save_checkpoint
from embodied_rl.cli import app
from embodied_rl.config import Config
from embodied_rl.runs import checkpoint_at, choose_run_dir, moved, runs_in


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


def save(run: Path, step: int, config: dict) -> Path:
    return save_checkpoint(run, step, {"policy": {"weight": torch.ones(2)}}, {}, config, keep=9)


def test_of_a_run_its_best_checkpoint_is_used_and_else_its_newest_sound_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = (save(tmp_path, step, Config(seed=step).model_dump()) for step in (1, 2, 3))
    mark_best(tmp_path, 1)
    assert [checkpoint_at(path)[:2] for path in (tmp_path, second)] == [
        (first, Config(seed=1)),
        (second, Config(seed=2)),
    ]
    for damaged in (first, third):
        (damaged / "policy.safetensors").write_bytes(b"")
    found, config, faults = checkpoint_at(tmp_path)
    assert (found, config.seed, faults) == (second, 2, [])
    assert f"skipped {third}" in caplog.text


def test_the_envs_of_a_mix_are_elsewhere_by_its_shares() -> None:
    shares = [{"id": "PushCube-v1"}, {"kind": "libero", "id": "libero_goal", "server": "tcp://yesterday:5005"}]
    config = Config.model_validate({"env": {"mix": shares}})
    today = "env.mix=[{id: PushCube-v1}, {kind: libero, id: libero_goal, server: 'tcp://today:5005'}]"
    found, faults = moved(config, [today])
    assert not faults and [share.server for share in found.env.mix] == [None, ("tcp://today:5005",)]
    (fault,) = moved(config, [today.replace("goal", "object")])[1]
    assert (fault.key, fault.problem) == ("env.mix", "an evaluation is of what was trained")
    (fault,) = moved(config, ["env.server=tcp://today:5005"])[1]
    assert fault.key == "env.server" and "servers of their own" in fault.problem
    served = Config.model_validate({"env": {"server": "tcp://yesterday:5005"}})
    assert moved(served, ["env.server=null"])[0].env.server == ()


@pytest.mark.parametrize("command", ["eval", "serve-policy"])
def test_what_is_no_checkpoint_is_refused_by_every_command_that_needs_one(tmp_path: Path, command: str) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "file").touch()
    exported = tmp_path / "empty" / "pretrained"
    exported.mkdir()
    (exported / "config.json").write_text("{}")
    later = save(tmp_path / "later", 1, {"algorithm": {"kind": "of tomorrow"}})
    for path, says in (
        (tmp_path / "nowhere", "no such directory"),
        (tmp_path / "empty", "has no checkpoint yet"),
        (tmp_path / "begun", "has no checkpoint yet"),
        (tmp_path / "folder" / "sub", "has no checkpoint yet"),
        (tmp_path / "file", "is a file, not a directory"),
        (exported, f"knows no env give {tmp_path / 'empty'}; OpenVLA is evaluated as it is here by `embodied-rl eval"),
        (tmp_path / "folder", "no manifest.json"),
        (later, "its configuration is not one of this version: algorithm.kind"),
    ):
        told = CliRunner().invoke(app, [command, str(path)])
        assert told.exit_code == 2 and says in " ".join(told.stderr.split()), told.output
    told = CliRunner().invoke(app, [command, "tiny_addition"])
    assert told.exit_code == 2 and "a language model" in told.stderr
