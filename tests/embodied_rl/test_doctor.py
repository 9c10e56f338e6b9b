"""The doctor: what it finds on this machine, and what it says of faults that cannot be staged here."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from embodied_rl import doctor
from embodied_rl.doctor import Check, VulkanDevice, VulkanProbe

needs_sapien = pytest.mark.skipif(importlib.util.find_spec("sapien") is None, reason="needs SAPIEN")

# As SAPIEN 3.0.3 prints it, with a second device that is not good enough.
SUMMARY = """GPU: llvmpipe (LLVM 15.0.6, 256 bits)
  Supported: 1
  Present:   0
  cudaId:    -1
GPU: Old card: second edition
  Supported: 0
  Present:   1
  cudaId:    0
"""


def in_new_process(code: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_import_loads_no_heavy_package() -> None:
    heavy = "{'torch', 'ray', 'sapien', 'mani_skill', 'wandb', 'rich', 'gymnasium'}"
    code = f"import sys, embodied_rl.doctor; print(sorted({heavy} & set(sys.modules)))"
    assert in_new_process(code) == "[]"


@needs_sapien
def test_vulkan_problem_agrees_with_sapien_and_does_not_import_it() -> None:
    ask_sapien = [sys.executable, "-c", "import sapien; print(sapien.render.get_device_summary())"]
    usable = "Supported: 1" in subprocess.run(ask_sapien, capture_output=True, text=True, check=False).stdout
    code = (
        "import sys; from embodied_rl.doctor import vulkan_problem;"
        "print(vulkan_problem() is None, 'sapien' in sys.modules)"
    )
    assert in_new_process(code) == f"{usable} False"


@needs_sapien
def test_vulkan_problem_without_a_driver_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VK_DRIVER_FILES", "/nonexistent")
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nonexistent")
    problem = doctor.vulkan_problem()
    assert problem is not None
    assert "no Vulkan driver" in problem
    assert "scripts/setup.sh --only-vulkan" in problem
    assert "mesa-vulkan-drivers" in problem


@needs_sapien
def test_vulkan_probe_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 0.01)
    problem = doctor.vulkan_problem()
    assert problem is not None
    assert "did not end within" in problem


@needs_sapien
def test_vulkan_probe_that_fails_shows_the_last_line_of_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "__file__", "/nonexistent/doctor.py")
    problem = doctor.vulkan_problem()
    assert problem is not None
    assert "ended with exit code 2" in problem
    assert "/nonexistent/doctor.py" in problem


@needs_sapien
def test_loader_lists_the_devices_that_sapien_accepts() -> None:
    code = (
        "import sapien, json; from embodied_rl import doctor as d; loader = d._vulkan_loader();"
        "print(json.dumps({x.name: x.driver for x in d._list_devices(loader)} if loader else {}))"
    )
    listed = json.loads(in_new_process(code))
    usable = doctor._probe_vulkan().usable
    if not usable:
        pytest.skip("no usable Vulkan device here")
    assert set(usable) <= set(listed)
    assert all(listed[name] for name in usable), "a driver that names itself"


def test_only_devices_marked_as_supported_are_usable() -> None:
    assert doctor._usable_devices(SUMMARY) == ["llvmpipe (LLVM 15.0.6, 256 bits)"]
    assert doctor._usable_devices(SUMMARY.replace("Supported: 1", "Supported: 0")) == []
    assert doctor._usable_devices("") == []


@pytest.mark.parametrize(
    ("probe", "fault", "fix"),
    [
        (VulkanProbe(sapien_found=False), "SAPIEN is not installed", "pip install -e '.[maniskill]'"),
        (VulkanProbe(loader_found=False, nvidia=False), "no Vulkan loader", "libvulkan1"),
        (VulkanProbe(error="none found", nvidia=False), "no Vulkan driver found (none found)", "setup.sh"),
        (VulkanProbe(error="none found", nvidia=True), "no Vulkan driver", "NVIDIA_DRIVER_CAPABILITIES=all"),
        (VulkanProbe(failure="was killed by signal 11", nvidia=False), "killed by signal 11", "setup.sh"),
        (
            VulkanProbe(devices=(VulkanDevice("llvmpipe", "Mesa 22.3.6 (LLVM 15.0.6)"),), nvidia=False),
            "too old for SAPIEN: llvmpipe with Mesa 22.3.6",
            "Mesa 23.3 or newer",
        ),
        (
            VulkanProbe(devices=(VulkanDevice("Small card", "Mesa 23.3.0"),), nvidia=False),
            "no Vulkan device has the features that SAPIEN needs: Small card with Mesa 23.3.0",
            "setup.sh",
        ),
    ],
)
def test_each_vulkan_fault_has_its_own_words_and_fix(probe: VulkanProbe, fault: str, fix: str) -> None:
    assert fault in probe.fault
    assert fix in probe.fix


def test_probe_with_a_usable_device_has_no_fault() -> None:
    assert VulkanProbe(usable=("llvmpipe",)).fault == ""


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
