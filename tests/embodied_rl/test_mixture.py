"""Envs on servers, and several kinds of envs in one run: who has which rows, and that servers change no result."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from embodied_rl.config import Config
from embodied_rl.mixture import allot, env_parts, rows_of_parts
from embodied_rl.recipe import load_recipe
from embodied_rl.train import train
from envs.base import ActionSpec, EnvError, EnvSpec
from envs.mixed import common_spec
from envs.server import EnvServer
from envs.session import Limits

SPEC = EnvSpec(ActionSpec((-1.0,), (1.0,)), 4, (2, 8, 8, 3), 10, "push", True)


@pytest.fixture
def server() -> Iterator[EnvServer]:
    server = EnvServer("gymnasium", "CartPole-v1", "tcp://127.0.0.1:*", limits=Limits(processes=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop(at_once=True)
    thread.join(20)


def config(**env: Any) -> Config:
    return Config(
        env={"kind": "gymnasium", "id": "CartPole-v1", "num_envs": 8, "processes": 1, **env},
        policy={"hidden": [16]},
        rollout={"steps": 32},
        algorithm={"epochs": 1, "minibatches": 2},
        train={"iterations": 2},
        evaluation={"every": 0, "final_episodes": 8, "videos": 0},
        tracking={"wandb": "disabled", "tensorboard": False},
        cluster={"cpu_slots": 2, "timeout_s": 120},
        placement="actor, rollout, env: all",
    )


def test_rows_are_cut_by_weight_into_whole_groups() -> None:
    assert allot(8, [3, 1]) == [6, 2]
    assert allot(10, [1, 1, 1]) == [4, 3, 3]
    assert allot(16, [7, 1], unit=4, minimum=1) == [12, 4]
    assert allot(3, [100, 1, 1], minimum=1) == [1, 1, 1]
    assert allot(1, [3, 1]) == [1, 0]
    grouped = config(mix=[{"weight": 3}, {}]).model_copy(
        update={"algorithm": config().algorithm.model_copy(update={"name": "grpo", "group_size": 2})}
    )
    assert rows_of_parts(grouped, 8) == [6, 2]


def test_parts_have_what_their_share_says_and_else_what_the_env_says() -> None:
    mixed = config(
        server=["ipc:///a", "ipc:///b"],
        horizon=50,
        mix=[{"weight": 3}, {"id": "CartPole-v0", "horizon": 20, "server": []}],
    )
    parts = env_parts(mixed.env)
    assert [(part.env.id, part.env.server, part.env.horizon, part.weight) for part in parts] == [
        ("CartPole-v1", ("ipc:///a",), 50, 1.5),
        ("CartPole-v1", ("ipc:///b",), 50, 1.5),
        ("CartPole-v0", (), 20, 1.0),
    ]


def test_kinds_that_do_not_go_together_are_refused_and_others_are_fitted() -> None:
    other = EnvSpec(SPEC.action, 9, (1, 8, 8, 3), 20, "pull", True)
    fitted = common_spec([SPEC, other])
    assert (fitted.state_size, fitted.image_shape, fitted.horizon) == (9, (1, 8, 8, 3), 20)
    with pytest.raises(EnvError, match="other actions"):
        common_spec([SPEC, EnvSpec(ActionSpec((0.0,), (1.0,)), 4, None, 10, "turn", True)])
    with pytest.raises(EnvError, match="all have a state or none: None, 4"):
        common_spec([SPEC, EnvSpec(SPEC.action, None, (2, 8, 8, 3), 10, "look", True)])
    with pytest.raises(EnvError, match="other sizes"):
        common_spec([SPEC, EnvSpec(SPEC.action, 4, (2, 9, 9, 3), 10, "turn", True)])


def test_faults_of_mixes_and_addresses_name_their_key(tmp_path: Path) -> None:
    keys = lambda *overrides: [fault.key for fault in load_recipe("cartpole_ppo", overrides)[1]]  # noqa: E731
    assert keys("env.server=tcp://robot:5005") == keys("env.server=[ipc://a.sock, ipc://b.sock]") == []
    (fault,) = load_recipe("cartpole_ppo", ["env.server=robot"])[1]
    assert fault.key == "env.server" and "nearest valid" not in fault.hint  # a list of it would be no better
    assert keys("env.server=tcp://robot:65535") == [] and keys("env.server=tcp://robot:65536") == ["env.server"]
    assert keys("env.kind=gym") == ["env.kind"] and keys("env.kind=my_sim:Point") == []
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(yaml.safe_dump({"env": {"mix": [{"id": "A"}] * 9, "num_envs": 8}}))
    assert "env.mix" in [fault.key for fault in load_recipe(str(recipe), [])[1]]
    recipe.write_text(yaml.safe_dump({"env": {"mix": [{"weight": 0}]}}))
    assert [fault.key for fault in load_recipe(str(recipe), [])[1]] == ["env.mix"]


def test_a_mixed_run_with_a_server_learns_what_it_learns_without_and_tells_success_by_env(
    server: EnvServer, tmp_path: Path
) -> None:
    results = {}
    for name, first in (("here", {}), ("there", {"server": [server.address]})):
        mixed = config(mix=[{"weight": 3, **first}, {"id": "CartPole-v0"}])
        assert train(mixed, tmp_path / name, resume=False, command="x") == 0
        learned = load_file(tmp_path / name / "checkpoints" / "step_000002" / "policy.safetensors")
        record = json.loads((tmp_path / name / "evaluation.json").read_text())
        results[name] = {key: tensor.tolist() for key, tensor in learned.items()}, record["episodes"]
    assert results["here"] == results["there"]
    assert server.counts["chunks"] > 0 and not server.counts["malformed"]
    metrics = [json.loads(line) for line in (tmp_path / "there" / "metrics.jsonl").read_text().splitlines()]
    assert {"rollout/return/CartPole-v1", "rollout/return/CartPole-v0"} <= set().union(*metrics)
    assert [episode["env"] for episode in record["episodes"]] == ["CartPole-v1"] * 6 + ["CartPole-v0"] * 2
    assert record["return/CartPole-v0"] == sum(episode["return"] for episode in record["episodes"][6:]) / 2
