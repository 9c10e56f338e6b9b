"""The shell scripts, run for real in a copy of the project whose Python is a stand-in that records its calls.

Nothing is installed here. Only one test touches the project's own .venv, and it only looks.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    *(
        f"scripts/{name}.sh"
        for name in ("setup", "test", "train_maniskill", "sft_maniskill", "eval_libero", "train_libero")
    ),
    ".ci/run",
]

# Answers as Python and pip would. PIP_FAILS: a word of the pip command that fails. VULKAN: the fault, if any.
STAND_IN_PYTHON = r"""#!/usr/bin/env bash
echo "python $*" | head -n 1 >>"$CALLS"
case "$*" in
    "--version") echo "Python 3.11.0" ;;
    "-m venv"*)
        folder="${@: -1}"
        mkdir -p "$folder/bin"
        cp "$STAND_IN" "$folder/bin/python"
        printf 'VIRTUAL_ENV="%s"\n' "$folder" >"$folder/bin/activate" ;;
    "-m pip install"*)
        if [ -n "${PIP_FAILS:-}" ] && [[ "$*" == *"$PIP_FAILS"* ]]; then
            echo "WARNING: Location 'file:///somewhere' is ignored: it is either a non-existing path"
            echo "ERROR: no such distribution"
            exit 1
        fi ;;
    "-m mypy"*|"-m pytest"*) exit "${MYPY_OR_PYTEST:-0}" ;;
    *vulkan_problem*) if [ -n "${VULKAN:-}" ]; then echo "$VULKAN"; exit 1; fi ;;
    *"import venv, ensurepip"*) exit "${WITHOUT_VENV:-0}" ;;
    *"sys.exit(not (3, 11)"*) exit "${TOO_OLD:-0}" ;;
    *"python%d.%d-venv"*) echo "python3.11-venv" ;;
esac
"""


class Project:
    """A copy of the scripts in a folder with a space in its name, and the commands that they may call."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "my project"
        self.bin = tmp_path / "bin"
        self.calls_file = tmp_path / "calls"
        (self.root / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        for script in (ROOT / "scripts").glob("*.sh"):
            shutil.copy(script, self.root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        for name in ("python3", "python3.11", "python3.12", "python3.13"):
            self.command(name, STAND_IN_PYTHON)
        for name in ("apt-get", "apt-cache"):  # the tests must never reach the real ones
            self.command(name, 'echo "$(basename "$0") $*" >>"$CALLS"; exit 1')
        self.command("id", "echo 1000")
        self.command(
            "df", 'printf "Filesystem 1024-blocks Used Available\\ndisk 90000000 1 ${FREE:-80000000} 1%% /\\n"'
        )
        self.command("chromium", "")
        self.env = {
            **os.environ,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            "STAND_IN": str(self.bin / "python3.11"),
        }

    def command(self, name: str, body: str) -> None:
        self.program(self.bin / name, body)

    def program(self, path: Path, body: str) -> None:
        path.write_text(body if body.startswith("#!") else f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        self.calls_file.write_text("")
        return subprocess.run(
            ["bash", str(self.root / "scripts" / script), *arguments],
            env={**self.env, **env},
            cwd=self.root.parent,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self, containing: str = "") -> list[str]:
        return [line for line in self.calls_file.read_text().splitlines() if containing in line]

    @property
    def stamp(self) -> Path:
        return self.root / ".venv" / ".setup-stamp"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def installed(project: Project) -> Project:
    done = project.run("setup.sh")
    assert done.returncode == 0, done.stderr
    return project


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_has_valid_syntax_and_can_be_executed(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("script", [Path(script).name for script in SCRIPTS if script.endswith(".sh")])
def test_help_explains_and_does_nothing(project: Project, script: str) -> None:
    done = project.run(script, "--help")
    assert done.returncode == 0
    assert f"scripts/{script}" in done.stdout
    assert project.calls() == []
    assert not (project.root / ".venv").exists()


def test_first_run_installs_and_the_second_is_silent_and_changes_nothing(project: Project) -> None:
    first = project.run("setup.sh")
    assert first.returncode == 0, first.stderr
    assert all(line.startswith("setup: ") for line in first.stdout.splitlines())
    assert "CC BY-NC 4.0" in first.stdout
    assert project.calls("pip install torch==2.14.1 torchvision==0.29.1")
    assert project.calls("pip install -e .[dev,maniskill]")
    before = (project.stamp.read_text(), project.stamp.stat().st_mtime_ns)

    second = project.run("setup.sh")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert project.calls("pip") == []
    assert (project.stamp.read_text(), project.stamp.stat().st_mtime_ns) == before


def test_failed_installation_shows_the_error_and_is_done_again_by_the_next_run(project: Project) -> None:
    failed = project.run("setup.sh", PIP_FAILS="-e .")
    assert failed.returncode != 0
    assert "ERROR: no such distribution" in failed.stderr
    assert "is ignored" not in failed.stderr
    assert not project.stamp.exists()

    repeated = project.run("setup.sh")
    assert repeated.returncode == 0
    assert project.calls("-m venv") == [], "the venv of the first try is used"
    assert project.calls("pip install -e .")
    assert project.stamp.exists()


def test_a_disk_that_is_nearly_full_is_spoken_of_beforehand(project: Project) -> None:
    said = project.run("setup.sh", FREE="5900000").stdout
    assert "note: 5 GB are free here, and a .venv with everything takes about 10" in said
    assert said.index("5 GB are free") < said.index("setup: installing")


def test_without_the_pinned_torch_the_range_of_pyproject_decides(project: Project) -> None:
    done = project.run("setup.sh", PIP_FAILS="torch==")
    assert done.returncode == 0
    assert "taking the versions that pyproject.toml allows" in done.stdout
    assert project.calls("pip install -e .")


@pytest.mark.parametrize("changed", ["pyproject.toml", "scripts/setup.sh"])
def test_changed_project_files_install_again(installed: Project, changed: str) -> None:
    with (installed.root / changed).open("a") as file:
        file.write("# changed\n")
    assert installed.run("setup.sh").returncode == 0
    assert installed.calls("pip install -e .")


def test_extras_are_added_to_those_installed_before(installed: Project) -> None:
    assert installed.run("setup.sh", "--extras", "dev").stdout == ""
    assert installed.run("setup.sh", "--extras=libero").returncode == 0
    assert installed.calls("pip install -e .[dev,libero,maniskill]")
    assert installed.run("setup.sh").stdout == ""


def test_unknown_extra_is_refused_before_anything_is_made(project: Project) -> None:
    done = project.run("setup.sh", "--extras", "maniskil,dev")
    assert done.returncode != 0
    assert "unknown extra 'maniskil'" in done.stderr
    assert "maniskill, libero" in done.stderr
    assert not (project.root / ".venv").exists()


def test_unknown_argument_is_refused(project: Project) -> None:
    done = project.run("setup.sh", "--no-vulcan")
    assert done.returncode != 0
    assert "unknown argument '--no-vulcan'" in done.stderr
    assert project.calls() == []


def test_moved_project_gets_a_new_venv(installed: Project) -> None:
    installed.root = installed.root.rename(installed.root.with_name("moved"))
    assert installed.run("setup.sh").returncode == 0
    assert installed.calls(f"-m venv --clear {installed.root}/.venv")
    assert installed.calls("pip install -e .")


def test_no_suitable_python_is_an_error_that_says_what_to_install(project: Project) -> None:
    done = project.run("setup.sh", TOO_OLD="1")
    assert done.returncode != 0
    assert "found no Python 3.11" in done.stderr
    without_venv = project.run("setup.sh", WITHOUT_VENV="1")
    assert without_venv.returncode != 0
    assert "apt-get install python3.11-venv" in without_venv.stderr
    assert project.calls("pip install") == []


on_debian = pytest.mark.skipif(not Path("/etc/debian_version").exists(), reason="needs Debian or Ubuntu")


@on_debian
def test_without_root_setup_says_what_to_ask_for_and_carries_on(project: Project) -> None:
    done = project.run("setup.sh", VULKAN="no Vulkan driver")
    assert done.returncode == 0
    assert "images and videos are off: no Vulkan driver" in done.stdout
    assert f"bash '{project.root}/scripts/setup.sh' --only-vulkan" in done.stdout
    assert "mesa-vulkan-drivers" in done.stdout
    assert project.calls("apt-get") == []

    later = project.run("setup.sh")
    assert (later.returncode, later.stdout) == (0, ""), "the driver is there by now"
    assert project.calls("pip install") == []
    assert "vulkan=ok" in project.stamp.read_text()


@on_debian
def test_vulkan_that_cannot_be_installed_does_not_fail_setup(project: Project) -> None:
    project.command("id", "echo 0")
    done = project.run("setup.sh", VULKAN="no Vulkan driver")
    assert done.returncode == 0
    assert "images and videos are off" in done.stdout
    assert project.calls("apt-get")
    assert "vulkan=ok" not in project.stamp.read_text()


@on_debian
def test_recent_mesa_is_installed_from_the_systems_own_suite(project: Project) -> None:
    project.command("id", "echo 0")
    project.command("apt-get", 'echo "apt-get $*" >>"$CALLS"')
    project.command("apt-cache", 'echo "  Candidate: 25.0.7-2"')
    project.run("setup.sh", VULKAN="no Vulkan driver")
    installs = project.calls(" install ")
    assert any(call.endswith("--no-install-recommends libvulkan1") for call in installs)
    assert any(call.endswith("--no-install-recommends mesa-vulkan-drivers") for call in installs)


def test_no_vulkan_skips_the_driver_until_a_run_without_it(project: Project) -> None:
    assert project.run("setup.sh", "--no-vulkan", VULKAN="no Vulkan driver").returncode == 0
    assert project.calls("apt-get") == []
    assert project.run("setup.sh", "--no-vulkan", VULKAN="no Vulkan driver").stdout == ""
    assert "images and videos are off" in project.run("setup.sh", VULKAN="no Vulkan driver").stdout


def test_real_environment_is_left_alone_if_it_is_current() -> None:
    script = ROOT / "scripts" / "setup.sh"
    look = ["bash", "-c", 'source "$1"; nothing_to_do maniskill,dev 1', "bash", str(script)]
    if subprocess.run(look, check=False).returncode != 0:
        pytest.skip("scripts/setup.sh has work to do here")
    stamp = ROOT / ".venv" / ".setup-stamp"
    before = stamp.stat().st_mtime_ns
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, cwd="/", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert stamp.stat().st_mtime_ns == before


# --- the apt source of a newer Mesa -------------------------------------------------------------------------

DEB822 = """# the mirror of this machine
Types: deb deb-src
URIs: https://mirror.example/security
Suites: trixie-security
Components: main
Signed-By: /usr/share/keyrings/security.gpg

Types: deb
URIs: https://mirror.example/disabled
Suites: trixie
Components: main
Enabled: no

Types: deb
URIs: https://mirror.example/debian
Suites: trixie trixie-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian.gpg
"""

ONE_LINE = """# deb https://mirror.example/commented trixie main
deb-src https://mirror.example/source trixie main
deb [signed-by=/usr/share/keyrings/security.gpg] https://mirror.example/security trixie-security main
deb [arch=amd64 signed-by=/usr/share/keyrings/debian.gpg] https://mirror.example/debian trixie main # x y
"""

EXPECTED = [
    "Types: deb",
    "Suites: trixie-backports",
    "Components: main",
    "URIs: https://mirror.example/debian",
    "Signed-By: /usr/share/keyrings/debian.gpg",
]


def write_backports(apt: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = 'source "$1"; write_backports_source "$2" trixie "$3"'
    return subprocess.run(
        ["bash", "-c", command, "bash", str(ROOT / "scripts" / "setup.sh"), str(apt), str(out)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sources.list.d/debian.sources", DEB822),
        ("sources.list", ONE_LINE),
        ("sources.list.d/debian.list", ONE_LINE),
    ],
)
def test_backports_come_from_the_machines_own_mirror_and_key(tmp_path: Path, name: str, text: str) -> None:
    apt = tmp_path / "etc apt"
    (apt / "sources.list.d").mkdir(parents=True)
    (apt / name).write_text(text)
    out = tmp_path / "new.sources"
    assert write_backports(apt, out).returncode == 0
    assert [line for line in out.read_text().splitlines() if not line.startswith("#")] == EXPECTED


def test_key_inside_a_source_is_copied_whole(tmp_path: Path) -> None:
    key = "Signed-By:\n -----BEGIN PGP PUBLIC KEY-----\n .\n mQINBGRx\n -----END PGP PUBLIC KEY-----\n"
    (tmp_path / "sources.list.d").mkdir()
    source = DEB822.replace("Signed-By: /usr/share/keyrings/debian.gpg\n", key)
    (tmp_path / "sources.list.d" / "debian.sources").write_text(source)
    out = tmp_path / "new.sources"
    assert write_backports(tmp_path, out).returncode == 0
    assert [line.rstrip() for line in out.read_text().splitlines()[-5:]] == key.splitlines()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("more.sources", "Types: deb\nURIs: https://a.example\nSuites: trixie-backports\nComponents: main\n"),
        ("more.list", "deb https://a.example/ trixie-backports main\n"),
    ],
)
def test_suite_that_is_there_is_not_added_again(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(ONE_LINE)
    (tmp_path / "sources.list.d" / name).write_text(text)
    assert write_backports(tmp_path, tmp_path / "new.sources").returncode == 0
    assert not (tmp_path / "new.sources").exists()


def test_no_source_to_copy_from_is_said(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb https://mirror.example/debian bookworm main\n")
    done = write_backports(tmp_path, tmp_path / "new.sources")
    assert done.returncode != 0
    assert "no source of 'trixie'" in done.stdout
    assert not (tmp_path / "new.sources").exists()


@pytest.mark.parametrize("suite_has_mesa", [True, False])
def test_old_mesa_is_taken_from_backports_which_are_removed_again_if_they_do_not_work(
    project: Project, suite_has_mesa: bool
) -> None:
    apt = project.root.parent / "apt"
    (apt / "sources.list.d").mkdir(parents=True)
    (apt / "sources.list").write_text(ONE_LINE)
    project.command("apt-get", 'echo "apt-get $*" >>"$CALLS"')
    newer = "echo ' mesa-vulkan-drivers | 25.0 | https://mirror.example trixie-backports/main amd64'"
    madison = newer if suite_has_mesa else ":"
    project.command("apt-cache", f'[ "$1" = policy ] && echo "  Candidate: 22.3.6-1" || {madison}')
    command = 'source "$1"; LOG="$2"; install_vulkan "$3" trixie'
    script, log = str(project.root / "scripts" / "setup.sh"), str(project.root / "log")
    subprocess.run(["bash", "-c", command, "bash", script, log, str(apt)], env=project.env, check=True)
    assert (apt / "sources.list.d" / "embodied-rl-backports.sources").exists() == suite_has_mesa
    driver = [call for call in project.calls(" install ") if "mesa-vulkan-drivers" in call]
    assert len(driver) == 1
    assert ("-t trixie-backports" in driver[0]) == suite_has_mesa


# --- the other scripts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "train maniskill_pushcube_ppo"),
        (["seed=2", "env.num_envs=4"], "train maniskill_pushcube_ppo seed=2 env.num_envs=4"),
        (["--resume"], "train maniskill_pushcube_ppo --resume"),
        (["other_recipe", "seed=2", "--dry-run"], "train other_recipe seed=2 --dry-run"),
    ],
)
def test_train_script_takes_a_recipe_settings_and_options(
    installed: Project, arguments: list[str], expected: str
) -> None:
    installed.program(installed.root / ".venv/bin/embodied-rl", 'echo "embodied-rl $*" >>"$CALLS"; exit 3')
    assert installed.run("train_maniskill.sh", *arguments).returncode == 3, "the training's own exit code"
    assert installed.calls("embodied-rl ") == [f"embodied-rl {expected}"]


def test_train_scripts_make_a_missing_warm_start_first_and_begin_from_it(installed: Project) -> None:
    recipes = installed.root / "embodied_rl" / "recipes"
    recipes.mkdir(parents=True, exist_ok=True)
    (recipes / "task_sft.yaml").touch()
    leaves = 'mkdir -p "runs/$2/pretrained"; printf "env:\n  kind: libero\npolicy:\n  kind: openvla_oft\n"'
    trained = f'[ "$1" != sft ] || {{ {leaves} >"runs/$2/config.yaml"; }}'
    installed.program(installed.root / ".venv/bin/embodied-rl", f'echo "embodied-rl $*" >>"$CALLS"\n{trained}')
    begins = "policy.openvla_oft.checkpoint=runs/task_sft/pretrained"

    def calls(script: str, *arguments: str) -> list[str]:
        done = installed.run(script, *arguments)
        assert done.returncode == 0, done.stderr
        return [call.removeprefix("embodied-rl ") for call in installed.calls("embodied-rl ")]

    assert calls("train_libero.sh", "task_grpo", "--dry-run") == ["train task_grpo --dry-run"]
    assert calls("train_libero.sh", "task_ppo", "seed=1") == [
        "collect task_sft --out demonstrations/task_sft",
        "sft task_sft --data demonstrations/task_sft",
        f"train task_ppo {begins} seed=1",
    ]
    assert calls("train_maniskill.sh", "task_grpo", "--resume") == [f"train task_grpo {begins} --resume"]
    given = "policy.openvla_oft.checkpoint=DIR"
    assert calls("train_libero.sh", "task_grpo", given) == [f"train task_grpo {given}"]
    assert calls("train_libero.sh", "task_sft") == ["train task_sft"]


def test_test_script_runs_all_checks_and_stops_at_the_first_failure(installed: Project) -> None:
    ruff = installed.root / ".venv/bin/ruff"
    installed.program(ruff, 'echo "ruff $*" >>"$CALLS"')
    passed = installed.run("test.sh", "-k", "a name")
    assert passed.returncode == 0, passed.stderr
    of_checks = ("ruff", "python -m mypy", "python -m pytest")
    checks = [call for call in installed.calls() if call.startswith(of_checks)]
    assert checks == ["ruff check .", "python -m mypy", "python -m pytest -k a name"]

    assert installed.run("test.sh").returncode == 0
    assert installed.calls("python -m pytest") == ["python -m pytest -n 2 --dist loadfile --no-loadscope-reorder"]

    assert installed.run("test.sh", MYPY_OR_PYTEST="4").returncode == 4
    assert installed.calls("pytest") == []

    installed.program(ruff, "exit 2")
    assert installed.run("test.sh").returncode == 2
    assert installed.calls("-m mypy") == []
