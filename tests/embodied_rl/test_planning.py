"""`embodied-rl plan` and the profiles that it reads: nothing is started, and what is missing is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from embodied_rl.cli import app
from embodied_rl.config import Config
from embodied_rl.planning import find_profile, parse_cluster, planned_flow
from embodied_rl.profiles import known_profile, machine_name, profiles_file, recipe_key, save_profile
from embodied_rl.recipe import load_recipe
from scheduler.profile import Profile, ProfileError, Sample

COSTS = {"env.rollout": 0.008, "rollout.generate": 0.002, "actor.update": 0.05, "rollout.load_weights": 0.001}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EMBODIED_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def measured(recipe: str = "cartpole_ppo", machine: str | None = None) -> Profile:
    config, faults = load_recipe(recipe, [])
    assert not faults
    profile = Profile(machine or machine_name(), recipe_key(config))
    return profile.add(*(Sample(name, 4, 2, seconds, 2**30, busy=0.9) for name, seconds in COSTS.items()))


def plan(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *words])
    return result.exit_code, result.output + (result.stderr or "")


def test_what_was_measured_is_planned(cache: Path) -> None:
    save_profile(measured(), cache)
    code, shown = plan("cartpole_ppo", "cluster.cpu_slots=2", "--compare", "--svg", str(cache / "plan.svg"))
    assert code == 0, shown
    for word in (
        "env.rollout <> rollout.generate",
        "placement",
        "an iteration",
        "GiB on each of devices",
        "collocated",
    ):
        assert word in shown
    assert (cache / "plan.svg").read_text().startswith("<svg")


def test_another_cluster_is_planned_from_a_file(cache: Path) -> None:
    save_profile(measured(machine="elsewhere with 2 cpu"), cache)
    code, shown = plan("cartpole_ppo", "--cluster", "2x8xH100", "--profile", str(cache / "profile.yaml"))
    assert code == 0, shown
    assert "16 H100" in shown and "measured on      elsewhere with 2 cpu" in shown
    assert "a device of another kind is taken to be as fast" in shown


def test_a_given_placement_is_predicted(cache: Path) -> None:
    save_profile(measured(), cache)
    code, shown = plan("cartpole_ppo", "cluster.cpu_slots=2", "placement=env: 0; rollout, actor: 1")
    assert code == 0, shown
    assert "env: 0; rollout, actor: 1" in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "embodied-rl train cartpole_ppo train.iterations=8"),
        (["--profile", "nowhere.yaml"], "there is no file nowhere.yaml"),
        (["env.num_envs=3"], "env.num_envs"),
    ],
)
def test_what_is_missing_is_said(cache: Path, words: list[str], expected: str) -> None:
    code, shown = plan("cartpole_ppo", *words)
    assert code == 2 and expected in shown


def test_a_cluster_that_is_none_is_refused_whatever_else_is_missing(cache: Path) -> None:
    code, shown = plan("cartpole_ppo", "--cluster", "eight GPUs")
    assert code == 2 and "expected for example 16x8xH100" in shown


def test_a_recipe_of_another_kind_is_sent_to_its_own_plan(cache: Path) -> None:
    code, shown = plan("tiny_addition")
    assert code == 2 and "embodied-rl train tiny_addition --dry-run" in shown


def test_clusters_are_read() -> None:
    (one,) = parse_cluster("16x8xH100")
    assert (one.kind, one.count, one.memory) == ("H100", 128, 80 * 2**30)
    first, second = parse_cluster("8xMI300:192 + 4xcpu")
    assert (first.count, first.memory, second.kind, second.memory) == (8, 192 * 2**30, "cpu", None)
    with pytest.raises(ValueError, match="memory of a MI300 is not known"):
        parse_cluster("8xMI300")


def test_profiles_are_kept_apart_by_what_costs(cache: Path) -> None:
    config = Config()
    same = Config(placement="env: 0; rollout, actor: 1", name="other", rollout={"pipeline_stages": 1})
    assert recipe_key(config) == recipe_key(same)
    assert recipe_key(config) != recipe_key(Config(policy={"hidden": [64]}))
    assert known_profile(config).samples == {}
    save_profile(measured(), cache)
    save_profile(measured("maniskill_pushcube_ppo"), cache)
    cartpole, _ = load_recipe("cartpole_ppo", [])
    assert known_profile(cartpole).samples.keys() == COSTS.keys()
    assert profiles_file() == cache / "cache" / "profiles.yaml"
    with pytest.raises(ProfileError, match="no profile of"):
        find_profile(Config(env={"id": "PullCube-v1"}), None)


@pytest.mark.parametrize("text", ["profiles: [{machine: here}]", "nonsense: [", "[1, 2]", "\xff"])
def test_a_damaged_file_is_put_aside(cache: Path, text: str) -> None:
    profiles_file().parent.mkdir(parents=True)
    profiles_file().write_bytes(text.encode("latin-1"))
    config, _ = load_recipe("cartpole_ppo", [])
    assert known_profile(config).samples == {}
    save_profile(measured(), cache)
    assert known_profile(config).samples.keys() == COSTS.keys()
    assert profiles_file().with_suffix(".damaged").read_bytes() == text.encode("latin-1")


def test_the_flow_for_planning_is_that_of_training() -> None:
    flow = planned_flow(Config())
    assert set(flow.calls()) == set(COSTS)
    assert flow.groups() == ["env", "rollout", "actor"]
