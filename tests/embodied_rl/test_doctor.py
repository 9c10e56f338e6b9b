"""The doctor: what it finds on this machine, and what it says of faults that cannot be staged here."""

import importlib.util
import os

import pytest
from new_process import in_new_process

from embodied_rl import doctor
from embodied_rl.doctor import Check


def test_import_loads_no_heavy_package() -> None:
    heavy = "{'torch', 'ray', 'sapien', 'mani_skill', 'wandb', 'rich', 'gymnasium'}"
    code = f"import sys, embodied_rl.doctor; print(sorted({heavy} & set(sys.modules)))"
    assert in_new_process(code) == "[]"


def test_simulator_problem_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_is_installed", lambda module: module != "mani_skill")
    assert "no package mani_skill)" in (doctor.simulator_problem("maniskill") or "")
    assert "pip install -e '.[maniskill]'" in (doctor.simulator_problem("maniskill") or "")
    assert doctor.simulator_problem("libero") is None


def test_simulator_problem_tells_what_is_installed() -> None:
    missing = [each for each in ("mani_skill", "sapien") if importlib.util.find_spec(each) is None]
    assert (doctor.simulator_problem("maniskill") is None) == (not missing)


def test_unknown_simulator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'gazebo'.*libero, maniskill"):
        doctor.simulator_problem("gazebo")


def test_without_any_simulator_one_is_missing_and_with_one_the_other_is_optional(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_is_installed", lambda module: False)
    assert [check.ok for check in doctor._check_simulators()] == [False, None]
    monkeypatch.setattr(doctor, "_is_installed", lambda module: module in ("libero", "robosuite"))
    assert [check.ok for check in doctor._check_simulators()] == [None, True]


def test_every_check_that_is_not_in_order_says_how_to_fix_it() -> None:
    checks = doctor.run_checks()
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.detail
        assert (check.fix == "") == (check.ok is True), check


def test_cores_are_those_this_process_may_use() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no processor affinity on this system")
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from embodied_rl import doctor; print(doctor._check_cores().detail)"
    )
    assert in_new_process(code).startswith("1 usable of ")


def test_wandb_is_online_with_a_key_and_the_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert doctor._check_wandb().ok is None
    monkeypatch.setenv("WANDB_API_KEY", "not-a-real-key")
    check = doctor._check_wandb()
    assert check.ok is True
    assert "online" in check.detail
    assert "not-a-real-key" not in str(check)


def test_report_fails_only_if_something_needed_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    optional = Check("GPU", None, "none [yet]", "buy one")
    monkeypatch.setattr(doctor, "run_checks", lambda: [Check("torch", True, "2.14.1"), optional])
    assert doctor.print_report() == 0
    shown = capsys.readouterr().out
    assert "Training from state works here" in shown
    assert "none [yet]" in shown
    assert "buy one" in shown

    missing = Check("ray", False, "not installed", "pip it")
    monkeypatch.setattr(doctor, "run_checks", lambda: [optional, missing])
    assert doctor.print_report() == 1
    shown = capsys.readouterr().out
    assert "missing: ray" in shown
    assert "pip it" in shown
