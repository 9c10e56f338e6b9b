"""Whether SAPIEN can render on this machine, and what is missing if it cannot (`embodied-rl doctor` prints it).

SAPIEN is asked in a process of its own: it reads the environment once, can crash in a broken driver, and would take a
second and 200 MB in the caller. This file is that process's program too. Importing it imports no simulator.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

MESA_MINIMUM = (23, 3)
PROBE_SECONDS = 60.0

VULKAN_FIX = (
    "run `bash scripts/setup.sh --only-vulkan` as root, or install libvulkan1 and mesa-vulkan-drivers "
    f"(Mesa {MESA_MINIMUM[0]}.{MESA_MINIMUM[1]} or newer; on Debian 12 from bookworm-backports)"
)
NVIDIA_FIX = (
    "install the graphics libraries of the NVIDIA driver (package libnvidia-gl-*), or start the container "
    "with NVIDIA_DRIVER_CAPABILITIES=all; or, on the CPU and slower: " + VULKAN_FIX
)


@dataclass(frozen=True)
class VulkanDevice:
    """A device that the Vulkan loader lists, usable for SAPIEN or not; `driver` is such as "Mesa 25.0.7"."""

    name: str
    driver: str

    def __str__(self) -> str:
        return f"{self.name} with {self.driver}" if self.driver else self.name

    @property
    def is_old_mesa(self) -> bool:
        match = re.search(r"Mesa (\d+)\.(\d+)", self.driver)
        return match is not None and (int(match[1]), int(match[2])) < MESA_MINIMUM


@dataclass(frozen=True)
class VulkanProbe:
    """What the probing process found; `failure` is set instead if it did not get to an answer."""

    sapien_found: bool = True
    loader_found: bool = True
    usable: tuple[str, ...] = ()
    devices: tuple[VulkanDevice, ...] = ()
    error: str = ""
    failure: str = ""
    nvidia: bool = field(default_factory=lambda: Path("/proc/driver/nvidia/version").exists())

    @property
    def fault(self) -> str:
        """What is wrong, empty if there is a usable device."""
        if not self.sapien_found:
            return "SAPIEN is not installed"
        if self.usable:
            return ""
        if self.failure:
            return f"the search for a Vulkan device {self.failure}"
        if not self.loader_found:
            return "no Vulkan loader (libvulkan.so.1)"
        if not self.devices:
            return f"no Vulkan driver found ({self.error or 'the loader lists no device'})"
        listed = ", ".join(str(device) for device in self.devices)
        if any(device.is_old_mesa for device in self.devices):
            return f"the Vulkan driver is too old for SAPIEN: {listed}"
        return f"no Vulkan device has the features that SAPIEN needs: {listed}"

    @property
    def fix(self) -> str:
        if not self.sapien_found:
            return "pip install -e '.[maniskill]'"
        return NVIDIA_FIX if self.nvidia else VULKAN_FIX


def vulkan_problem() -> str | None:
    """Says why SAPIEN cannot render on this machine and what fixes it, or None if it has a usable device."""
    probe = probe_vulkan()
    return f"{probe.fault}; to fix it: {probe.fix}" if probe.fault else None


def probe_vulkan() -> VulkanProbe:
    """Runs this file as a program (see `_report`) and reads its answer."""
    if importlib.util.find_spec("sapien") is None:
        return VulkanProbe(sapien_found=False)
    # -P: the folder of this file must not be searched for modules; its siblings have common names.
    command = [sys.executable, "-P", "-W", "ignore", __file__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return VulkanProbe(failure=f"did not end within {PROBE_SECONDS:.0f} s")
    if done.returncode < 0:
        return VulkanProbe(failure=f"was killed by signal {-done.returncode}")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return VulkanProbe(failure=f"ended with exit code {done.returncode}: {last}")
    answer = json.loads(lines[-1])
    return VulkanProbe(
        loader_found=answer["loader_found"],
        usable=tuple(answer["usable"]),
        devices=tuple(VulkanDevice(**device) for device in answer["devices"]),
        error=answer["error"],
    )


def _report() -> None:
    """Runs in the probing process: prints one line of JSON with what SAPIEN and the loader say."""
    error, usable = "", []
    try:
        import sapien

        usable = _usable_devices(sapien.render.get_device_summary())
    except RuntimeError as exc:  # how SAPIEN says that it found no device
        error = str(exc)
    devices: list[dict[str, str]] = []
    loader = _vulkan_loader()
    if loader is not None and not usable:
        devices = [{"name": device.name, "driver": device.driver} for device in _list_devices(loader)]
    answer = {"loader_found": loader is not None, "usable": usable, "devices": devices, "error": error}
    print(json.dumps(answer))


def _usable_devices(summary: str) -> list[str]:
    """The names of the devices that `sapien.render.get_device_summary()` marks as supported.

    The summary has a block of lines for each device: "GPU: NAME", then indented ones such as "Supported: 1".
    """
    usable, name = [], ""
    for line in summary.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "GPU":
            name = value
        elif key == "Supported" and value == "1":
            usable.append(name)
    return usable


def _vulkan_loader() -> ctypes.CDLL | None:
    # SAPIEN sets this variable when it is imported and finds no loader on the system.
    for name in (os.environ.get("SAPIEN_VULKAN_LIBRARY_PATH"), "libvulkan.so.1"):
        try:
            if name:
                return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _list_devices(loader: ctypes.CDLL) -> list[VulkanDevice]:
    """Asks the Vulkan loader itself, because SAPIEN does not say why it refuses a device.

    The structures are those of the Vulkan 1.2 specification; empty if no driver starts.
    """

    class ApplicationInfo(ctypes.Structure):
        _fields_ = [
            ("type", ctypes.c_uint32),
            ("next", ctypes.c_void_p),
            ("application_name", ctypes.c_char_p),
            ("application_version", ctypes.c_uint32),
            ("engine_name", ctypes.c_char_p),
            ("engine_version", ctypes.c_uint32),
            ("api_version", ctypes.c_uint32),
        ]

    class InstanceCreateInfo(ctypes.Structure):
        _fields_ = [
            ("type", ctypes.c_uint32),
            ("next", ctypes.c_void_p),
            ("flags", ctypes.c_uint32),
            ("application", ctypes.POINTER(ApplicationInfo)),
            ("layer_count", ctypes.c_uint32),
            ("layers", ctypes.c_void_p),
            ("extension_count", ctypes.c_uint32),
            ("extensions", ctypes.c_void_p),
        ]

    class DriverProperties(ctypes.Structure):
        _fields_ = [
            ("type", ctypes.c_uint32),
            ("next", ctypes.c_void_p),
            ("driver_id", ctypes.c_int32),
            ("driver_name", ctypes.c_char * 256),
            ("driver_info", ctypes.c_char * 256),
            ("conformance", ctypes.c_uint8 * 4),
        ]

    class DeviceProperties2(ctypes.Structure):
        _fields_ = [
            ("type", ctypes.c_uint32),
            ("next", ctypes.c_void_p),
            ("versions_and_ids", ctypes.c_uint32 * 5),
            ("device_name", ctypes.c_char * 256),
            ("identifier_and_limits", ctypes.c_uint8 * 1024),  # the rest is 544 bytes, not read here
        ]

    application = ApplicationInfo(type=0, api_version=(1 << 22) | (2 << 12))
    create_info = InstanceCreateInfo(type=1, application=ctypes.pointer(application))
    instance = ctypes.c_void_p()
    if loader.vkCreateInstance(ctypes.byref(create_info), None, ctypes.byref(instance)) != 0:
        return []
    count = ctypes.c_uint32(0)
    loader.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    handles = (ctypes.c_void_p * count.value)()
    loader.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
    devices = []
    for handle in handles:
        driver = DriverProperties(type=1000196000)
        device = DeviceProperties2(type=1000059001, next=ctypes.addressof(driver))
        loader.vkGetPhysicalDeviceProperties2(ctypes.c_void_p(handle), ctypes.byref(device))
        info = driver.driver_info.decode(errors="replace") or driver.driver_name.decode(errors="replace")
        devices.append(VulkanDevice(device.device_name.decode(errors="replace"), info))
    loader.vkDestroyInstance(instance, None)
    return devices


if __name__ == "__main__":
    _report()
