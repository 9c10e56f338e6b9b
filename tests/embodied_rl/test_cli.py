"""The command `embodied-rl`: bad input is answered at once and before anything starts."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

from embodied_rl import cli
from embodied_rl.checkpoint import save_checkpoint
from embodied_rl.cli_ends import interruptible
from embodied_rl.config import Config
from embodied_rl.recipe import EMBODIED, load_recipe
from embodied_rl.schema import all_keys

PUSH_CUBE = "maniskill_pushcube_ppo"
HEAVY = ("ray", "torch", "mani_skill", "sapien", "transformers", "wandb", "matplotlib")
ONE_SCREEN = 24
# Runs the console script's entry and prints which heavy modules it imported.
ENTRY = (
    "import sys, atexit; from embodied_rl.cli import main; sys.argv[0] = 'embodied-rl';"
    f"atexit.register(lambda: print('HEAVY', [m for m in {HEAVY} if sys.modules.get(m)])); main()"
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path / "assets"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands in for training and evaluation, and lists what they were called with."""
    calls: list[dict[str, Any]] = []

    def train(config: Config, run_dir: Path, resume: bool, command: str) -> int:
        calls.append({"config": config, "run_dir": run_dir, "resume": resume, "command": command})
        return 7

    def evaluate_checkpoint(checkpoint: Path, **options: Any) -> int:
        calls.append({"checkpoint": checkpoint, **options})
        return 0

    for name, function in (("train", train), ("evaluate", evaluate_checkpoint)):
        module = types.ModuleType(f"embodied_rl.{name}")
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def run_process(*arguments: str, before: str = "", **environment: str) -> tuple[int, str, str]:
    """As `run`, in a process of its own; checks that nothing heavy was imported."""
    done = subprocess.run(
        [sys.executable, "-c", before + ENTRY, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert done.stdout.endswith("HEAVY []\n"), done.stdout[-300:] + done.stderr[-2000:]
    return done.returncode, done.stdout.removesuffix("HEAVY []\n"), done.stderr


def save(run_dir: Path, *overrides: str) -> Path:
    loaded, faults = load_recipe(PUSH_CUBE, overrides)
    assert faults == []
    stored = loaded.model_dump(mode="json")
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(stored))
    return save_checkpoint(run_dir, 10, {"policy": {"w": torch.ones(1)}}, {}, stored, keep=1)


# --- one bad input each -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "answers"),
    [
        (["env.num_env=9"], ["env.num_env = 9", "no such key", "env.num_envs"]),
        (["env.num_envs=many"], ["env.num_envs = many", "a text", "an integer >= 1"]),
        (["algorithm.gamma=1.5"], ["algorithm.gamma = 1.5", "<= 1", "nearest valid: 1"]),
        (["env.num_envs=9"], ["env.num_envs = 9", "rollout.pipeline_stages (2)", "8 or 10"]),
        (["maniskill_pushcube_grpo", "algorithm.group_size=6"], ["algorithm.group_size = 6", "4 or 8"]),
        (["policy.chunk=5"], ["policy.chunk = 5", "env.horizon (12)", "nearest valid: 4 or 6"]),
        (["env.id=PushCub-v1"], ["env.id = PushCub-v1", "PushCube-v1"]),
        (["env.id=PickSingleYCB-v1"], ["env.id", "python -m mani_skill.utils.download_asset -y ycb"]),
        (["run_root=/proc/runs"], ["/proc/runs/maniskill_pushcube_ppo", "cannot be written", "run_root"]),
        (["maniskil_pushcube"], ["recipe = maniskil_pushcube", PUSH_CUBE]),
        (["foo.yaml"], ["recipe = foo.yaml", "no such file"]),
        ([PUSH_CUBE, "steps"], ["steps", "key=value"]),
        (["--resume"], ["nothing to resume", "runs/maniskill_pushcube_ppo does not exist"]),
    ],
)
def test_bad_input_is_answered_on_one_screen_with_exit_code_2(
    arguments: list[str], answers: list[str], started: list[dict[str, Any]]
) -> None:
    code, out, err = run("train", *arguments)
    assert (code, out, started) == (2, "", [])
    for answer in answers:
        assert answer in err, err
    assert len(err.splitlines()) <= ONE_SCREEN
    assert not Path("runs").exists()


def test_a_damaged_checkpoint_is_not_resumed(started: list[dict[str, Any]]) -> None:
    checkpoint = save(Path("runs") / PUSH_CUBE)
    (checkpoint / "policy.safetensors").write_bytes(b"garbage")
    code, _, err = run("train", "--resume")
    assert (code, started) == (2, [])
    assert "no usable checkpoint" in err and "policy.safetensors has 7 bytes" in err


def test_a_changed_network_is_not_resumed(started: list[dict[str, Any]]) -> None:
    save(Path("runs") / PUSH_CUBE)
    code, _, err = run("train", "--resume", "policy.hidden=[64, 64]", "policy.log_std=0")
    assert (code, started) == (2, [])
    assert "policy.hidden = [64, 64]: a resumed run keeps its network; it was [128, 128]" in err
    assert "policy.log_std = 0" in err


def test_a_name_that_is_taken_is_not_overwritten(started: list[dict[str, Any]]) -> None:
    save(Path("runs/mine"))
    code, _, err = run("train", "name=mine")
    assert (code, started) == (2, [])
    assert "runs/mine already exists" in err and "--resume" in err


def test_a_missing_simulator_is_answered_with_the_command_before_anything_is_imported() -> None:
    code, _, err = run_process("train", before="import sys; sys.modules['mani_skill'] = None;")
    assert code == 2
    assert "pip install -e '.[maniskill]'" in err


def test_images_without_a_vulkan_device_point_to_the_doctor() -> None:
    nowhere = {"VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"}
    code, _, err = run_process("train", "env.observation=[state, image]", **nowhere)
    assert code == 2
    assert "Vulkan" in err and "embodied-rl doctor" in err


def test_all_faults_come_at_once_on_one_screen_before_ray_is_imported() -> None:
    code, out, err = run_process(
        "train", "maniskill_pushcube_grpo", "env.num_env=16", "algorithm.gamma=2", "algorithm.lr=fast",
        "policy.chunk=5", "env.id=PushCub-v1", "run_root=/proc/runs", "algorithm.filter_low=0.9",
        "algorithm.filter_high=0.1", "env.processes=0", "placement=actor: 7", "nonsense",
    )  # fmt: skip
    assert (code, out) == (2, "")
    keys = {line.strip().split(" = ")[0] for line in err.splitlines()[1:] if not line.startswith("   ")}
    assert keys == {
        "env.num_env", "algorithm.gamma", "algorithm.lr", "policy.chunk", "rollout.steps", "env.id",
        "run directory", "algorithm.filter_low", "env.processes", "placement", "command line",
    }  # fmt: skip
    assert err.startswith("11 faults")
    assert len(err.splitlines()) <= ONE_SCREEN


def test_what_was_not_understood_is_not_checked_further(started: list[dict[str, Any]]) -> None:
    code, _, err = run("train", "env.kind=gazebo", "env.id=libero_10")
    assert (code, started) == (2, [])
    assert err.startswith("1 fault;") and "env.kind = gazebo" in err


# --- what good input does ---------------------------------------------------------------------------------


def test_training_gets_the_configuration_and_gives_the_exit_code(started: list[dict[str, Any]]) -> None:
    code, _, err = run("train", "cartpole_ppo", "algorithm.lr=1e-3", "seed=4")
    assert (code, err) == (7, "")
    (call,) = started
    assert (call["config"].seed, call["config"].algorithm.lr, call["config"].env.id) == (
        4,
        1e-3,
        "CartPole-v1",
    )
    assert (call["run_dir"], call["resume"]) == (Path("runs/cartpole_ppo"), False)


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_run_directory_is_resumed_with_its_own_configuration(slash: str, started: list[dict[str, Any]]) -> None:
    save(Path("runs/mine"), "policy.hidden=[32]", "name=mine")
    code, _, err = run("train", "--resume", f"runs/mine{slash}", "train.iterations=999")
    assert (code, err) == (7, "")
    (call,) = started
    assert (call["run_dir"], call["resume"]) == (Path("runs/mine"), True)
    assert (call["config"].policy.hidden, call["config"].train.iterations) == ((32,), 999)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run_root=out", "name=foo"],
        ["run_root=out/", "name=foo/"],
        [f"{PUSH_CUBE}/", "run_root=out/", "name=foo"],
    ],
)
def test_a_trailing_slash_in_a_path_changes_nothing(arguments: list[str], started: list[dict[str, Any]]) -> None:
    assert run("train", *arguments)[0] == 7
    assert started[0]["run_dir"] == Path("out/foo")
    save(Path("out/foo"))
    assert run("train", *arguments, "--resume")[0] == 7
    assert started[1]["run_dir"] == Path("out/foo")


def test_a_dry_run_prints_everything_and_starts_nothing() -> None:
    code, out, err = run_process("train", "policy.chunk=2", "cluster.cpu_slots=2", "--dry-run")
    assert (code, err) == (0, "")
    text, _, rest = out.partition("Plan (")
    printed = yaml.safe_load(text.partition("\n")[2])
    expected = load_recipe(PUSH_CUBE, ["policy.chunk=2", "cluster.cpu_slots=2"])[0].model_dump(mode="json")
    assert printed == expected
    assert text.count("chunk: 2  # default: 1") == 1
    assert "env      1 rank(s) on cpu 0, 1" in rest
    assert "8 in all; 2 process(es)" in rest and "up to 4 envs in each" in rest
    assert "18 chunk steps of 2 action(s)" in rest
    assert "144 chunk steps an iteration, 288 env steps" in rest
    assert "32 optimiser steps an iteration" in rest
    assert "1.600 GB = 2 x 0.8 GB (maniskill)" in rest
    assert "Vulkan" in rest.partition("Not checked")[2]
    assert not Path("runs").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["recipes"], ["keys"]])
def test_help_and_lists_import_nothing_heavy(arguments: list[str]) -> None:
    assert run_process(*arguments)[0] == 0


def test_the_console_script_is_installed() -> None:
    script = Path(sys.executable).with_name("embodied-rl")
    done = subprocess.run([script, "recipes"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()][: len(EMBODIED.names())] == list(EMBODIED.names())


def test_keys_are_explained() -> None:
    out = run("keys")[1]
    assert [line.split(" = ")[0] for line in out.splitlines() if not line.startswith(" ")] == list(all_keys())
    assert "algorithm.gamma = 0.99  a number >= 0 and <= 1" in run("keys", "algorithm.")[1]
    assert "env.horizon" not in run("keys", "algorithm.")[1]
    code, _, err = run("keys", "algoritm.gamma")
    assert code == 2 and "algorithm.gamma" in err


def test_an_interrupted_run_says_so_in_one_line_and_exits_with_130(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["embodied_rl.train"], "train", interrupted)
    assert run("train") == (130, "", "interrupted\n")


def test_an_unexpected_error_of_training_is_not_hidden(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object, **options: object) -> int:
        raise RuntimeError("first cause")

    monkeypatch.setattr(sys.modules["embodied_rl.train"], "train", failing)
    with pytest.raises(RuntimeError, match="first cause"):
        run("train")


# --- eval and report --------------------------------------------------------------------------------------


def test_a_run_is_evaluated_at_its_newest_checkpoint(started: list[dict[str, Any]]) -> None:
    checkpoint = save(Path("runs/mine"))
    assert run("eval", "runs/mine/")[0] == 0
    assert run("eval", str(checkpoint), "--episodes", "5", "--seed", "3", "--videos", "0", "--stochastic")[0] == 0
    by_run, by_checkpoint = started
    folder = Path("runs/mine/evaluations/step_000010").absolute()
    assert (by_run["checkpoint"], by_run["folder"]) == (checkpoint, folder)
    assert (by_run["episodes"], by_run["videos"], by_run["deterministic"]) == (100, 2, True)
    assert by_checkpoint.pop("config") == load_recipe(PUSH_CUBE, [])[0]
    assert by_checkpoint == {
        "checkpoint": checkpoint,
        "folder": folder,  # the stand-in has left the first one empty, so that it is gone again
        "episodes": 5,
        "seed": 3,
        "videos": 0,
        "deterministic": False,
    }


def test_actions_are_sampled_where_the_run_s_evaluation_does_and_as_the_user_says(
    started: list[dict[str, Any]],
) -> None:
    save(Path("runs/mine"), "evaluation.deterministic=false")
    assert run("eval", "runs/mine")[0] == run("eval", "runs/mine", "--deterministic")[0] == 0
    assert [call["deterministic"] for call in started] == [False, True]


def test_a_run_is_evaluated_with_its_envs_elsewhere_and_with_nothing_else_than_it_had(
    started: list[dict[str, Any]],
) -> None:
    save(Path("runs/mine"), "env.server=tcp://yesterday:5005", "env.fixed_actions={2: 0.5}")
    assert run("eval", "runs/mine", "env.server=tcp://today:5005", "env.server_timeout_s=5")[0] == 0
    moved = started[0]["config"]
    assert moved.env.server == ("tcp://today:5005",) and moved.env.server_timeout_s == 5
    assert moved.env.fixed_actions == {2: 0.5}
    for words, answer in (
        (["env.server=today"], "expected an address"),
        (["env.python=python3"], "env.server is given too"),
        (["env.id=PickCube-v1"], "env.id=PickCube-v1: an evaluation is of what was trained"),
        (["env.server=tcp://today:5005", "--suite", "libero_spatial"], "without overrides"),
    ):
        code, _, said = run("eval", "runs/mine", *words)
        assert code == 2 and answer in said
    assert len(started) == 1


@pytest.mark.parametrize(
    ("words", "useless"),
    [
        (["runs/mine", "--trials", "5", "--resume"], ["--trials = 5: not of a run", "--resume = true: not of a run"]),
        (["tiny_addition", "--benchmark", "f.jsonl", "--deterministic"], ["--stochastic/--deterministic = false"]),
        (["openvla-tiny", "--suite", "libero_goal", "--samples", "2"], ["--samples = 2: not of a suite"]),
    ],
)
def test_options_of_another_kind_of_evaluation_are_refused(
    words: list[str], useless: list[str], started: list[dict[str, Any]]
) -> None:
    save(Path("runs/mine"))
    code, _, said = run("eval", *words)
    assert code == 2 and all(fault in said for fault in useless) and f"{len(useless)} fault" in said
    assert not started


def foreign(path: Path) -> None:
    (path / "manifest.json").write_text("{}")


def older_config(path: Path) -> None:
    save_checkpoint(path.parent.parent, 10, {}, {}, {"policy": {"kind": "transformer"}}, keep=1)


@pytest.mark.parametrize(
    ("spoil", "target", "answer"),
    [
        (None, "runs/mini", "runs: runs/mine"),
        (None, "runs", "no manifest.json"),
        (foreign, "runs/mine/checkpoints/step_000010", "not a checkpoint of embodied-rl"),
        (foreign, "runs/mine", "no usable checkpoint"),
        (older_config, "runs/mine", "not one of this version: policy.kind"),
    ],
)
def test_what_is_no_checkpoint_is_not_evaluated(
    spoil: Callable[[Path], None] | None, target: str, answer: str, started: list[dict[str, Any]]
) -> None:
    checkpoint = save(Path("runs/mine"))
    if spoil:
        spoil(checkpoint)
    code, _, err = run("eval", target)
    assert (code, started) == (2, [])
    assert answer in err


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("random", "is evaluated on LIBERO's suites name one: --suite libero_spatial"),
        ("expert", "is evaluated on LIBERO's suites"),
        ("openvla-tiny", "is evaluated on LIBERO's suites"),
        ("cartpole_ppo", "is a recipe; what is evaluated is a run of it such as runs/cartpole_ppo"),
        ("tiny_addition", "--benchmark: a language model is evaluated on one"),
        ("", "name a run or a checkpoint; with --suite, expert, random"),
    ],
)
def test_a_policy_that_is_no_run_is_told_the_option_that_it_needs(word: str, answer: str) -> None:
    code, _, err = run_process("eval", *([word] if word else []))
    assert code == 2 and answer in " ".join(err.split())


def test_a_model_on_a_benchmark_is_told_how_it_is_named() -> None:
    Path("pretrained").mkdir()
    Path("pretrained", "config.json").touch()
    for word, hint in (("pretrained", "name one, and model.path=pretrained"), ("random", "see `embodied-rl recipes`")):
        code, _, err = run("eval", word, "--benchmark", "f.jsonl")
        assert code == 2 and "only a run or a recipe of a language model" in err and hint in err


def test_an_evaluation_that_could_not_be_kept_is_not_begun(started: list[dict[str, Any]]) -> None:
    checkpoint = save(Path("runs/mine"))
    code, _, err = run("eval", "runs/mine", "--out", "/proc/x")
    assert (code, started) == (2, []) and "--out = /proc/x: cannot be written" in err
    assert run("eval", "runs/mine", "--out", "mine")[0] == 0
    elsewhere = checkpoint.rename("copied")
    assert run("eval", str(elsewhere))[0] == 0
    assert [call["folder"] for call in started] == [Path("mine"), Path("evaluations/copied")]


def test_sigterm_ends_every_command_as_ctrl_c_does(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as ended, interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert ended.value.exit_code == 130 and "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_report_of_no_run_is_refused() -> None:
    save(Path("runs/mine"))
    code, _, err = run("report", "runs/mini")
    assert code == 2
    assert "runs/mine" in err


@pytest.fixture
def reported_run() -> Path:
    save(Path("runs/mine"))
    (Path("runs/mine") / "metrics.jsonl").write_text(json.dumps({"step": 1, "env_steps": 8, "rollout/return": 1.0}))
    return Path("runs/mine")


def test_a_curve_that_cannot_be_drawn_is_told_by_that_name(reported_run: Path) -> None:
    for curve, problem in (("/proc/x.svg", "cannot be written"), ("x.png", "ends in .svg"), (".", "ends in .svg")):
        code, out, err = run("report", str(reported_run), "--curve", curve)
        assert (code, out) == (2, "") and f"--curve = {curve}: " in err and problem in err
        assert "the report was not started" in err and "runs:" not in err
    code, out, err = run("report", str(reported_run), "--curve", "x.svg")
    assert code == 2 and "report.html" in out
    assert "the curve was not started" in err and "has no success rates to draw" in err and "runs:" not in err


def test_a_report_that_cannot_be_written_is_a_fault(reported_run: Path) -> None:
    (reported_run / ".report.html.partial").mkdir()
    code, _, err = run("report", str(reported_run))
    assert code == 2 and "report.html.partial" in err


def test_a_plan_that_cannot_be_drawn_is_not_made() -> None:
    code, out, err = run("plan", "cartpole_ppo", "--svg", "/proc/x.svg")
    assert (code, out) == (2, "") and "--svg = /proc/x.svg: cannot be written" in err
