"""metrics.jsonl, TensorBoard and W&B as a run leaves them on disk, resumed and not."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied_rl import tracking_wandb
from embodied_rl.tracking import NullTracker, Tracker, read_metrics
from embodied_rl.tracking_wandb import api_key_known, resolve_mode, sync_command

CONFIG = {"seed": 3, "env": {"id": "PushCube-v1"}}


@pytest.fixture(autouse=True)
def no_wandb_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home directory without W&B credentials."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(home / "wandb"))
    return home


def plain(run_dir: Path, resume_step: int | None = None) -> Tracker:
    return Tracker(run_dir, CONFIG, name="test", wandb_mode="disabled", tensorboard=False, resume_step=resume_step)


def lines(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines()


def wandb_records(run_dir: Path, expected: list[bytes]) -> bytes:
    """What W&B wrote offline; its service writes the last of it some milliseconds after a run is finished."""
    deadline = time.monotonic() + 60
    while True:
        written = b"".join(path.read_bytes() for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")))
        if all(value in written for value in expected) or time.monotonic() > deadline:
            return written
        time.sleep(0.01)


def test_a_line_is_on_disk_as_soon_as_it_is_logged_with_sorted_keys_and_exact_floats(tmp_path: Path) -> None:
    with plain(tmp_path) as tracker:
        tracker.log(1, {"rollout/return": 0.1, "env_steps": 288, "losses/value": 1 / 3})
        assert lines(tmp_path) == [
            '{"step": 1, "env_steps": 288, "losses/value": 0.3333333333333333, "rollout/return": 0.1}'
        ]


def test_numpy_and_torch_scalars_become_numbers(tmp_path: Path) -> None:
    with plain(tmp_path) as tracker:
        tracker.log(2, {"a": np.float32(0.5), "b": torch.tensor(0.25), "c": np.int64(7)})  # type: ignore[dict-item]
    assert lines(tmp_path) == ['{"step": 2, "a": 0.5, "b": 0.25, "c": 7}']


def test_nan_and_infinity_are_null_in_strict_json(tmp_path: Path) -> None:
    with plain(tmp_path) as tracker:
        tracker.log(0, {"a": float("nan"), "b": float("-inf"), "c": 1.0})
    assert lines(tmp_path) == ['{"step": 0, "a": null, "b": null, "c": 1.0}']
    assert read_metrics(tmp_path) == [{"step": 0, "a": None, "b": None, "c": 1.0}]


def test_a_metric_may_not_be_called_step(tmp_path: Path) -> None:
    with plain(tmp_path) as tracker, pytest.raises(ValueError, match="'step'"):
        tracker.log(1, {"step": 2.0})


def test_a_fresh_run_refuses_a_directory_with_metrics(tmp_path: Path) -> None:
    with plain(tmp_path) as tracker:
        tracker.log(1, {"a": 1.0})
    with pytest.raises(FileExistsError, match="resume it or choose another run name"):
        plain(tmp_path)
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize("torn", ["", '{"step": 5, "a": 0.', '{"step"', "\0\0\0"])
def test_resume_drops_later_and_torn_lines_and_continues_like_an_unbroken_run(tmp_path: Path, torn: str) -> None:
    def log(tracker: Tracker, steps: range) -> None:
        for step in steps:
            tracker.log(step, {"b": step / 7, "a": float("nan") if step == 2 else float(step)})

    with plain(tmp_path / "unbroken") as tracker:
        log(tracker, range(1, 7))
    with plain(tmp_path / "resumed") as tracker:
        log(tracker, range(1, 5))
    with (tmp_path / "resumed/metrics.jsonl").open("a") as file:
        file.write(torn)
    with plain(tmp_path / "resumed", resume_step=3) as tracker:
        assert [json.loads(line)["step"] for line in lines(tmp_path / "resumed")] == [1, 2, 3]
        log(tracker, range(4, 7))
    assert lines(tmp_path / "resumed") == lines(tmp_path / "unbroken")
    assert not list((tmp_path / "resumed").glob("*.tmp"))


def test_resume_at_step_zero_starts_afresh_even_without_a_file(tmp_path: Path) -> None:
    with plain(tmp_path, resume_step=0) as tracker:
        tracker.log(1, {"a": 1.0})
    with plain(tmp_path, resume_step=0):
        assert lines(tmp_path) == []


def test_reading_leaves_out_a_torn_last_line_but_not_damage_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    assert read_metrics(tmp_path) == [{"step": 1, "a": 1.0}]
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"\n{"step": 3, "a": 3.0}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path)


def test_tensorboard_reads_every_scalar_and_resume_purges_what_came_after(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def track(resume_step: int | None, steps: range, sign: int) -> None:
        with Tracker(tmp_path, CONFIG, name="t", wandb_mode="disabled", resume_step=resume_step) as tracker:
            for step in steps:
                tracker.log(step, {"rollout/return": sign * step / 2})

    track(None, range(1, 5), 1)
    track(2, range(3, 6), -1)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    found = [(event.step, event.value) for event in accumulator.Scalars("rollout/return")]
    assert found == [(1, 0.5), (2, 1.0), (3, -1.5), (4, -2.0), (5, -2.5)]


def test_wandb_offline_records_metrics_table_and_video_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from embodied_rl.video import write_mp4

    video = write_mp4(tmp_path / "a.mp4", np.zeros((3, 16, 16, 3), np.uint8), fps=5)
    run_dir = tmp_path / "run"

    def track(resume_step: int | None, value: float) -> str:
        with Tracker(
            run_dir, CONFIG, name="t", wandb_mode="offline", tensorboard=False, resume_step=resume_step
        ) as tracker:
            tracker.log(1 if resume_step is None else 2, {"rollout/return": value})
            tracker.table(2, "completions", ["question", "reward"], [["1 + 1", 1.0]])
            tracker.video(2, "videos/final", video)
            tracker.summary({"final/success_once": 0.875})
            assert tracker.wandb_location == str(run_dir / "wandb")
        return (run_dir / "wandb_id").read_text()

    first = track(None, 0.123456789)
    assert track(1, 0.987654321) == first
    expected = [
        b"0.123456789",
        b"0.987654321",
        b"rollout/return",
        b"PushCube-v1",
        b"0.875",
        first.strip().encode(),
    ]
    written = wandb_records(run_dir, expected)
    assert [value for value in expected if value not in written] == []
    assert list((run_dir / "wandb").glob("offline-run-*/files/media/videos/**/*.mp4"))
    assert list((run_dir / "wandb").glob("offline-run-*/files/media/table/*.json"))
    out, err = capfd.readouterr()
    assert out == "" and err == ""


def test_auto_without_a_key_is_offline_and_says_how_to_upload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolve_mode("auto", tmp_path) == "offline"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"wandb sync {tmp_path}/wandb/offline-run-*" in said
    assert sync_command(Path("my runs/a")) == "wandb sync 'my runs/a/wandb'/offline-run-*"


def test_auto_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert resolve_mode("auto", tmp_path) == "online"
    assert resolve_mode("offline", tmp_path) == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve_mode("auto", tmp_path) == "disabled"
    assert resolve_mode("offline", tmp_path) == "offline"
    monkeypatch.setenv("WANDB_MODE", "of-line")
    with pytest.raises(ValueError, match="WANDB_MODE is 'of-line'"):
        resolve_mode("auto", tmp_path)


def test_a_key_is_found_where_wandb_login_puts_it(monkeypatch: pytest.MonkeyPatch, no_wandb_account: Path) -> None:
    assert not api_key_known()
    (no_wandb_account / ".netrc").write_text("machine api.wandb.ai login user password " + "b" * 40)
    assert api_key_known()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not api_key_known()
    (no_wandb_account / "wandb").mkdir()
    (no_wandb_account / "wandb/settings").write_text("[default]\napi_key = " + "c" * 40)
    assert api_key_known()


def test_an_unreachable_wandb_is_reported_once_and_everything_is_recorded_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(tracking_wandb, "INIT_TIMEOUT_S", 1.0)
    with Tracker(tmp_path, CONFIG, name="t", tensorboard=False) as tracker:
        tracker.log(1, {"rollout/return": 0.123456789})
    assert b"0.123456789" in wandb_records(tmp_path, [b"0.123456789"])
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "continuing offline" in err


def test_a_failing_wandb_call_does_not_reach_the_caller(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Tracker(tmp_path, CONFIG, name="t", wandb_mode="offline", tensorboard=False) as tracker:
        tracker.video(1, "videos/missing", tmp_path / "missing.mp4")
        tracker.table(1, "ragged", ["one"], [["too", "many"]])
        tracker.log(1, {"a": 1.0})
    assert len(lines(tmp_path)) == 1
    assert capfd.readouterr().err.count("\n") == 1


def test_the_null_tracker_has_the_whole_interface_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    with NullTracker() as tracker:
        tracker.log(1, {"a": 1.0})
        tracker.video(1, "v", Path("missing.mp4"))
        tracker.table(1, "t", ["a"], [[1]])
        tracker.summary({"a": 1})
        assert tracker.wandb_location == ""
    assert set(tmp_path.rglob("*")) == before
    public = {name for name, _ in inspect.getmembers(Tracker) if not name.startswith("_")}
    assert public <= set(vars(NullTracker))


def test_importing_the_tracker_and_the_report_loads_nothing_heavy() -> None:
    code = (
        "import sys, embodied_rl.tracking, embodied_rl.report, embodied_rl.progress, embodied_rl.video;"
        "print([m for m in ('wandb', 'tensorboard', 'torch', 'matplotlib', 'imageio', 'imageio_ffmpeg',"
        " 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
