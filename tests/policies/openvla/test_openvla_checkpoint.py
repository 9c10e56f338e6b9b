"""Checkpoints: what is read, what is written, and how a fault is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from openvla_golden import TINY, golden_policy, observation
from safetensors.torch import load_file, save_file

from policies import SlotNoise, openvla
from policies.openvla.checkpoint import CheckpointError, save_checkpoint
from policies.openvla.config import ConfigError
from policies.openvla.problems import problems
from policies.openvla.settings import OpenVLASettings


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The golden model in several files."""
    policy = golden_policy()
    state = policy.network.state_dict()
    save_checkpoint(tmp_path / "sharded", state, policy.config, policy.processor, shard_bytes=3 * 10**6)
    return tmp_path / "sharded"


def copy_of_tiny(directory: Path) -> Path:
    return Path(shutil.copytree(TINY, directory))


def edit_shard(directory: Path, key: str, replacement: torch.Tensor | None) -> None:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    file = directory / index["weight_map"][key]
    state = load_file(file)
    del state[key]
    if replacement is not None:
        state[key] = replacement
    save_file(state, file)


def test_weights_are_loaded_as_stored_in_either_type() -> None:
    stored = load_file(TINY / "model.safetensors")
    for dtype in ("float32", "bfloat16"):
        state = golden_policy(dtype=dtype).network.state_dict()
        assert state.keys() == stored.keys()
        for key, value in state.items():
            assert value.dtype == getattr(torch, dtype)
            assert torch.equal(value, stored[key].to(value.dtype))
    assert golden_policy(dtype="bfloat16").critic.layers[0].weight.dtype == torch.float32


def test_a_sharded_checkpoint_is_the_same_model(sharded: Path) -> None:
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    state = golden_policy().network.state_dict()
    assert set(index["weight_map"]) == set(state)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values())
    loaded = openvla.load(sharded).network.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_every_missing_unexpected_and_misshapen_key_is_named(sharded: Path) -> None:
    edit_shard(sharded, "language_model.lm_head.weight", None)
    edit_shard(sharded, "projector.fc1.bias", torch.zeros(7))
    edit_shard(sharded, "projector.fc2.bias", None)
    file = next(sharded.glob("model-00001-*.safetensors"))
    save_file({**load_file(file), "extra.weight": torch.zeros(2, 3)}, file)
    with pytest.raises(CheckpointError) as error:
        openvla.load(sharded)
    lines = str(error.value).splitlines()[1:]
    assert sorted(line.strip() for line in lines) == [
        "misshapen: projector.fc1.bias is [7], expected [320]",
        "missing: language_model.lm_head.weight [32064, 32]",
        "missing: projector.fc2.bias [32]",
        "unexpected: extra.weight [2, 3]",
    ]


def test_a_missing_file_is_named(sharded: Path, tmp_path: Path) -> None:
    next(sharded.glob("model-00002-*.safetensors")).unlink()
    with pytest.raises(FileNotFoundError, match="has no model-00002-of-"):
        openvla.load(sharded)
    directory = copy_of_tiny(tmp_path / "tiny")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json; name a directory that has one as `tokenizer`"):
        openvla.load(directory)
    openvla.load(directory, tokenizer=str(TINY))
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has no model.safetensors"):
        openvla.load(directory, tokenizer=str(TINY))
    (directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="is not a checkpoint: it has no config.json"):
        openvla.load(directory)
    with pytest.raises(FileNotFoundError, match="no directory, and no preset; presets: openvla-tiny"):
        openvla.load("openvla-tinny")


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    directory = copy_of_tiny(tmp_path / "tiny")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ConfigError, match="a model of type 'llama'; expected 'openvla'"):
        openvla.load(directory)
    config["text_config"]["hidden_size"] = 64
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="do not fit its config.json"):
        openvla.load(directory)


@pytest.mark.parametrize(
    ("file", "content", "error", "told"),
    [
        ("model.safetensors.index.json", {}, CheckpointError, "has no weight_map"),
        ("model.safetensors.index.json", {"weight_map": {"a": 5}}, CheckpointError, "has no weight_map"),
        ("preprocessor_config.json", {"means": None}, ConfigError, "means is None; expected three numbers for each"),
        ("preprocessor_config.json", {"stds": [[0.5]]}, ConfigError, r"stds is \[\[0.5\]\]; expected three numbers"),
        ("preprocessor_config.json", {"image_resize_strategy": "fit"}, ConfigError, "'fit'; known: resize-naive"),
    ],
)
def test_a_file_beside_the_weights_that_is_not_as_expected_is_named(
    tmp_path: Path, file: str, content: dict, error: type[Exception], told: str
) -> None:
    directory = copy_of_tiny(tmp_path / "tiny")
    written = json.loads((directory / file).read_text()) if (directory / file).exists() else {}
    (directory / file).write_text(json.dumps({**written, **content}))
    with pytest.raises(error, match=f"{file}.*{told}"):
        openvla.load(directory)
    [(option, problem)] = problems(str(directory), OpenVLASettings(unnorm_key="bridge_golden"))
    assert option == "checkpoint" and file in problem


def test_what_is_saved_acts_like_what_was_loaded(tmp_path: Path) -> None:
    before = golden_policy()
    before.save_pretrained(tmp_path / "copy")
    after = openvla.load(tmp_path / "copy", unnorm_key="libero_golden_no_noops")
    seen = observation(3)
    first, second = (policy.act(seen, False, SlotNoise(0, range(3))) for policy in (before, after))
    assert torch.equal(first.token, second.token)
    assert torch.equal(first.action, second.action)
    own = {"policy_settings.json"}
    assert {file.name for file in (tmp_path / "copy").iterdir()} - own == {file.name for file in TINY.iterdir()}
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == {
        **json.loads((TINY / "config.json").read_text()),
        "norm_stats": json.loads((TINY / "dataset_statistics.json").read_text()),
    }
    with pytest.raises(FileExistsError, match="holds a checkpoint already"):
        before.save_pretrained(tmp_path / "copy")


def test_the_type_of_the_weights_is_kept(tmp_path: Path) -> None:
    golden_policy(dtype="bfloat16").save_pretrained(tmp_path / "half")
    assert openvla.load(tmp_path / "half").network.config.dtype == torch.bfloat16
    stored, written = load_file(TINY / "model.safetensors"), load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(written[key], value) for key, value in stored.items())


def test_a_preset_can_be_saved_and_loaded(tmp_path: Path) -> None:
    before = openvla.load("openvla-tiny")
    before.save_pretrained(tmp_path / "tiny")
    after = openvla.load(tmp_path / "tiny")
    seen = observation(2)
    assert {file.name for file in (tmp_path / "tiny").iterdir()} == {
        "config.json",
        "dataset_statistics.json",
        "model.safetensors",
        "policy_settings.json",
        "preprocessor_config.json",
        "tokenizer.json",
    }
    assert torch.equal(before.act(seen, True, None).action, after.act(seen, True, None).action)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1.0}, r"unknown options \['temprature'\] of OpenVLASettings; known: unnorm_key"),
        ({"lora": {"ranks": 4}}, r"unknown options \['ranks'\] of LoRASettings; known: rank, alpha, targets"),
        ({"attention": "flash"}, "attention is 'flash'; expected one of 'sdpa', 'eager'"),
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of None, 'float32', 'bfloat16'"),
        ({"frozen": ("vision",)}, "frozen is 'vision'; expected one of 'vision_backbone'"),
        ({"frozen": ("projector",), "lora": {}}, "lora and frozen are given"),
        ({"value_position": "a0"}, "unknown value position 'a0'; expected first, last or mean"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"view": -1}, "view is -1; expected a whole number, at least 0"),
        ({"frozen": None}, "frozen is None; expected a list or a tuple"),
        ({"value_hidden": 5}, "value_hidden is 5; expected a list or a tuple"),
        ({"value_hidden": (0,)}, "value_hidden is 0; expected a whole number, at least 1"),
        ({"prompt_length": "a"}, "prompt_length is 'a'; expected a whole number, at least 1"),
    ],
)
def test_options_that_do_not_exist_or_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        openvla.load("openvla-tiny", **options)
