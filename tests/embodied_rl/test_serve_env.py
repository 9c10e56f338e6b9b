"""The command that serves envs: what a word on its command line names, and what it leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from embodied_rl.config import Config
from embodied_rl.serve_env import served_env
from embodied_rl.workers import env_pools


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


def test_a_server_leaves_no_folder_behind(tmp_path: Path) -> None:
    program = "import sys; from embodied_rl.cli import main; main()"
    command = [sys.executable, "-c", program, "serve-env", "CartPole-v1", "--bind", f"ipc://{tmp_path}/server"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as server:
        assert server.stdout is not None and b"serving" in server.stdout.readline()
        assert list(tmp_path.glob("env-server-*"))
        server.terminate()
        assert server.wait(60) == 0
    assert not list(tmp_path.glob("env-server-*"))


def test_a_server_of_its_own_takes_all_envs_of_training_and_of_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Server:
        address = "ipc:///nowhere"

        def __init__(self, arguments: list[str], python: str) -> None:
            started.append(arguments)

    monkeypatch.setattr(env_pools, "ServerProcess", Server)
    monkeypatch.setattr(env_pools, "RemotePool", lambda *_: None)
    env = {"kind": "gymnasium", "id": "CartPole-v1", "num_envs": 600, "python": "python3"}
    env_pools.EnvPools(Config(env=env), 600, "cpu", 1)
    assert "--max-envs=1200" in started[0]
