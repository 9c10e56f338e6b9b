"""What is found out of a Vulkan device on this machine, and what is said of faults that cannot be staged here."""

import importlib.util
import json
import subprocess
import sys

import pytest
from new_process import in_new_process

from embodied_rl import vulkan
from embodied_rl.vulkan import VulkanDevice, VulkanProbe

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


@needs_sapien
def test_vulkan_problem_agrees_with_sapien_and_does_not_import_it() -> None:
    ask_sapien = [sys.executable, "-c", "import sapien; print(sapien.render.get_device_summary())"]
    usable = "Supported: 1" in subprocess.run(ask_sapien, capture_output=True, text=True, check=False).stdout
    code = (
        "import sys; from embodied_rl.vulkan import vulkan_problem;"
        "print(vulkan_problem() is None, 'sapien' in sys.modules)"
    )
    assert in_new_process(code) == f"{usable} False"


@needs_sapien
def test_vulkan_problem_without_a_driver_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VK_DRIVER_FILES", "/nonexistent")
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nonexistent")
    problem = vulkan.vulkan_problem()
    assert problem is not None
    assert "no Vulkan driver" in problem
    assert "scripts/setup.sh --only-vulkan" in problem
    assert "mesa-vulkan-drivers" in problem


@needs_sapien
def test_vulkan_probe_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan, "PROBE_SECONDS", 0.0)
    problem = vulkan.vulkan_problem()
    assert problem is not None
    assert "did not end within" in problem


@needs_sapien
def test_vulkan_probe_that_fails_shows_the_last_line_of_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan, "__file__", "/nonexistent/vulkan.py")
    problem = vulkan.vulkan_problem()
    assert problem is not None
    assert "ended with exit code 2" in problem
    assert "/nonexistent/vulkan.py" in problem


@needs_sapien
def test_loader_lists_the_devices_that_sapien_accepts() -> None:
    code = (
        "import sapien, json; from embodied_rl import vulkan as d; loader = d._vulkan_loader();"
        "print(json.dumps({x.name: x.driver for x in d._list_devices(loader)} if loader else {}))"
    )
    listed = json.loads(in_new_process(code))
    usable = vulkan.probe_vulkan().usable
    if not usable:
        pytest.skip("no usable Vulkan device here")
    assert set(usable) <= set(listed)
    assert all(listed[name] for name in usable), "a driver that names itself"


def test_only_devices_marked_as_supported_are_usable() -> None:
    assert vulkan._usable_devices(SUMMARY) == ["llvmpipe (LLVM 15.0.6, 256 bits)"]
    assert vulkan._usable_devices(SUMMARY.replace("Supported: 1", "Supported: 0")) == []
    assert vulkan._usable_devices("") == []


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
