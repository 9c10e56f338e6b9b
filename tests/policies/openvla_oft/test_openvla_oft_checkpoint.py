"""Checkpoints of OpenVLA-OFT: files beside the main weights, statistics, what is written, and how a fault is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from openvla_golden import DATA, TINY
from openvla_oft_golden import LIBERO, film_backbone, full_observation, golden_oft, regression, write_side_files
from torch import Tensor

from policies import SlotNoise, openvla, openvla_oft
from policies.lora import LoRASettings
from policies.openvla.checkpoint import CheckpointError
from policies.openvla.config import OpenVLAConfig
from policies.openvla_oft import OpenVLAOFTSettings, problems
from policies.openvla_oft.model import OpenVLAOFT

EVERYTHING: dict[str, Any] = {"head": "l1", "more_views": (1,), "proprioception": True, "film": True}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the golden model with all files beside it."""
    shutil.copytree(TINY, tmp_path / "full")
    write_side_files(tmp_path / "full")
    return tmp_path / "full"


def action(policy: openvla_oft.OpenVLAOFTPolicy) -> Tensor:
    return policy.act(full_observation(2), True, None).action


def test_the_published_modules_have_the_published_tensors() -> None:
    published = json.loads((DATA / "real_oft_state_dict_shapes.json").read_text())
    settings = OpenVLAOFTSettings(head="l1", proprioception=True, film=True)
    with torch.device("meta"):
        network = OpenVLAOFT(OpenVLAConfig.from_dict({"model_type": "openvla", "torch_dtype": "bfloat16"}), settings)
        assert network.add_modules(7, 8) == ["vision_backbone", "proprio_projector", "action_head"]
    own = {name: network.get_submodule(name).state_dict() for name in ("action_head", "proprio_projector")}
    own["vision_backbone"] = {f"vision_backbone.{k}": v for k, v in network.vision_backbone.state_dict().items()}
    assert {name: {key: list(value.shape) for key, value in state.items()} for name, state in own.items()} == published


def test_names_may_begin_with_the_prefix_of_distributed_training(directory: Path) -> None:
    write_side_files(directory, prefix="module.")
    policy = openvla_oft.load(directory, unnorm_key=LIBERO, **EVERYTHING)
    assert torch.equal(action(policy), action(regression(film=True)))


def test_adapters_in_the_file_of_the_backbone_are_merged(directory: Path) -> None:
    """Of rank 32, so that they count half: alpha is 16."""
    generator, state = torch.Generator().manual_seed(0), film_backbone()
    wrapped, expected = {}, dict(state)
    for key, value in state.items():
        if key.endswith(("attn.qkv.weight", "patch_embed.proj.weight")):
            name = key.removesuffix(".weight")
            down = torch.randn(32, *value.shape[1:], generator=generator) / 10
            up = torch.randn(len(value), 32, *[1] * (value.dim() - 2), generator=generator) / 10
            wrapped |= {
                f"{name}.base_layer.weight": value,
                f"{name}.lora_A.default.weight": down,
                f"{name}.lora_B.default.weight": up,
            }
            expected[key] = value + 0.5 * torch.einsum("ir,r...->i...", up.flatten(1), down)
        elif key.endswith(("attn.qkv.bias", "patch_embed.proj.bias")):
            wrapped[f"{key.removesuffix('.bias')}.base_layer.bias"] = value
        else:
            wrapped[key] = value
    file = next(directory.glob("vision_backbone--*"))
    torch.save({f"vision_backbone.{key}": value for key, value in wrapped.items()}, file)
    loaded = openvla_oft.load(directory, unnorm_key=LIBERO, film=True).network.vision_backbone.state_dict()
    assert loaded.keys() == expected.keys()
    for key, value in loaded.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-6)


def test_files_that_the_options_do_not_ask_for_are_not_read(directory: Path) -> None:
    for file in directory.glob("*.pt"):
        file.write_bytes(b"")
    openvla_oft.load(directory, unnorm_key=LIBERO)


def test_what_is_saved_acts_like_what_was_loaded(tmp_path: Path) -> None:
    before = regression(film=True)
    before.save_pretrained(tmp_path / "copy")
    after = openvla_oft.load(tmp_path / "copy", unnorm_key=LIBERO, **EVERYTHING)
    assert torch.equal(action(before), action(after))
    assert {file.name for file in (tmp_path / "copy").glob("*.pt")} == {
        f"{name}--latest_checkpoint.pt" for name in ("action_head", "proprio_projector", "vision_backbone")
    }
    plain = openvla.load(tmp_path / "copy", unnorm_key=LIBERO)  # the main file is OpenVLA's
    assert plain.network.state_dict().keys() == openvla.load(TINY).network.state_dict().keys()


def test_a_preset_with_adapters_can_be_saved_and_loaded(tmp_path: Path) -> None:
    options = {"more_views": (1,), "proprioception": True, "film": True, "chunk": 3}
    lora = {"rank": 2, "targets": ("q_proj", "proprio_projector.fc1", "shift", "qkv")}
    before = openvla_oft.load("openvla-oft-tiny", **options, lora=lora)
    with torch.no_grad():
        for name, parameter in before.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(std=0.1)
    before.save_pretrained(tmp_path / "tiny")
    after = openvla_oft.load(tmp_path / "tiny", **options)
    seen = full_observation(2)
    token = before.act(seen, False, SlotNoise(0, range(2))).token
    torch.testing.assert_close(after.evaluate(seen, token)[0], before.evaluate(seen, token)[0], rtol=0, atol=1e-4)


def test_the_type_of_all_weights_is_the_chosen_one() -> None:
    policy = golden_oft(**EVERYTHING, dtype="bfloat16")
    assert {parameter.dtype for parameter in policy.network.parameters()} == {torch.bfloat16}
    assert action(policy).isfinite().all()


def test_statistics_replace_those_of_the_base_or_are_added_to_them(directory: Path) -> None:
    mine = {"mine": json.loads((TINY / "dataset_statistics.json").read_text())[LIBERO]}
    (directory / "dataset_statistics.json").write_text(json.dumps(mine))
    assert set(openvla_oft.load(directory).config.norm_stats) == {"mine"}
    assert set(openvla_oft.load(directory, layout="rlinf").config.norm_stats) == {"mine", "bridge_golden", LIBERO}


# ---------------------------------------------------------------------------------------------- faults


def test_a_file_that_is_missing_or_there_twice_is_named(directory: Path) -> None:
    shutil.copy(directory / "action_head--150000_checkpoint.pt", directory / "action_head--latest_checkpoint.pt")
    with pytest.raises(CheckpointError, match="several: action_head--150000_checkpoint.pt, action_head--latest_chec"):
        openvla_oft.load(directory, unnorm_key=LIBERO, **EVERYTHING)
    (directory / "proprio_projector--150000_checkpoint.pt").unlink()
    with pytest.raises(FileNotFoundError, match="has no proprio_projector--<step>_checkpoint.pt"):
        openvla_oft.load(directory, unnorm_key=LIBERO, proprioception=True)
    with pytest.raises(FileNotFoundError, match="no directory, and no preset; presets: openvla-oft-tiny"):
        openvla_oft.load("openvla-tiny")


def test_every_missing_unexpected_and_misshapen_key_is_named(directory: Path) -> None:
    file = directory / "action_head--150000_checkpoint.pt"
    state = torch.load(file)
    del state["model.fc1.weight"]
    torch.save(state | {"model.fc2.bias": torch.zeros(5), "model.fc3.bias": torch.zeros(5)}, file)
    with pytest.raises(CheckpointError, match="do not fit the model") as error:
        openvla_oft.load(directory, unnorm_key=LIBERO, **EVERYTHING)
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == [
        "action_head--150000_checkpoint.pt:",
        "missing: model.fc1.weight [32, 224]",
        "unexpected: model.fc3.bias [5]",
        "misshapen: model.fc2.bias is [5], expected [7]",
    ]


def test_a_head_for_another_number_of_dimensions_is_refused(directory: Path) -> None:
    statistics = json.loads((TINY / "dataset_statistics.json").read_text())[LIBERO]
    short = {name: values[:6] if isinstance(values, list) else values for name, values in statistics["action"].items()}
    (directory / "dataset_statistics.json").write_text(json.dumps({"six": {**statistics, "action": short}}))
    with pytest.raises(CheckpointError, match=r"misshapen: model.fc2.bias is \[7\], expected \[6\]"):
        openvla_oft.load(directory, head="l1")


def test_of_extremes_no_quantiles_are_needed(directory: Path) -> None:
    statistics = json.loads((directory / "dataset_statistics.json").read_text())
    for of in statistics[LIBERO].values():
        if isinstance(of, dict):
            of.pop("q01")
    (directory / "dataset_statistics.json").write_text(json.dumps(statistics))
    told = lambda bounds: dict(  # noqa: E731
        problems(str(directory), OpenVLAOFTSettings(unnorm_key=LIBERO, bounds=bounds, **EVERYTHING))
    )
    assert "have no q01" in told("quantiles")["unnorm_key"] and told("extremes") == {}


FC1 = "model.fc1.lora_{}.default.weight"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is damaged, was not downloaded as a whole, or holds more than a state dict"),
        (b"version https://git-lfs.github.com/spec/v1", "is damaged"),
        (torch.nn.Linear(1, 1), "is damaged, was not downloaded as a whole, or holds more than a state dict"),
        ([1, 2], "holds a list; expected a state dict: tensors by their names"),
        ({"model_state": {}}, "holds a dict under 'model_state'; expected a state dict"),
        ({FC1.format("A"): torch.zeros(2, 3)}, "holds an adapter, but not 'model.fc1.lora_B.default.weight'"),
        (
            {FC1.format("A"): torch.zeros(2, 3), FC1.format("B"): torch.zeros(5, 4)},
            "holds an adapter that does not fit its weight",
        ),
    ],
)
def test_a_file_beside_the_weights_that_is_no_state_dict_is_named(directory: Path, content: Any, told: str) -> None:
    file = next(directory.glob("action_head--*"))
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=f"{file.name} {told}"):
        openvla_oft.load(directory, unnorm_key=LIBERO, head="l1")
    [(option, problem)] = problems(str(directory), OpenVLAOFTSettings(unnorm_key=LIBERO, head="l1"))
    assert option == "checkpoint" and told in problem


def test_a_file_beside_the_weights_that_is_cut_short_is_named(directory: Path) -> None:
    file = next(directory.glob("action_head--*"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=f"{file.name} is damaged, was not downloaded as a whole"):
        openvla_oft.load(directory, unnorm_key=LIBERO, head="l1")


def test_files_in_the_format_before_pytorch_1_6_are_read(directory: Path) -> None:
    file = next(directory.glob("action_head--*"))
    torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)
    policy = openvla_oft.load(directory, unnorm_key=LIBERO, head="l1", more_views=(1,), proprioception=True)
    assert torch.equal(action(policy), action(regression()))


def test_problems_list_statistics_and_a_configuration_of_the_wrong_kind(directory: Path) -> None:
    told = lambda **options: dict(problems(str(directory), OpenVLAOFTSettings(unnorm_key=LIBERO, **options)))  # noqa: E731
    statistics = json.loads((TINY / "dataset_statistics.json").read_text())
    statistics[LIBERO]["action"] |= {"mask": None, "q01": None}
    (directory / "dataset_statistics.json").write_text(json.dumps(statistics))
    assert "q01 is None; expected a list of numbers" in told()["unnorm_key"]
    assert "q01 is None; expected a list of numbers" in told(head="l1")["unnorm_key"]
    config = json.loads((TINY / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "n_action_bins": None}))
    assert "config.json: n_action_bins is None" in told()["checkpoint"]


@pytest.mark.parametrize("views", [1, "1", None, (-1,), ("wrist",)])
def test_more_views_are_numbers_of_cameras(views: object) -> None:
    with pytest.raises(ValueError, match="more_views is .*; expected a "):
        openvla_oft.load("openvla-oft-tiny", more_views=views)


def without_states(directory: Path) -> None:
    """Take the statistics of states away."""
    statistics = json.loads((TINY / "dataset_statistics.json").read_text())
    del statistics[LIBERO]["proprio"]
    (directory / "dataset_statistics.json").write_text(json.dumps(statistics))


def test_statistics_that_are_needed_are_named(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"misshapen: fc1.weight is \[32, 8\], expected \[32, 7\]"):
        golden_oft(unnorm_key="bridge_golden", proprioception=True)
    without_states(directory)
    with pytest.raises(KeyError, match=f"the statistics of '{LIBERO}' have no 'proprio'; known: action"):
        openvla_oft.load(directory, unnorm_key=LIBERO, proprioception=True)
    with pytest.raises(KeyError, match="name the data set.*bridge_golden, libero_golden_no_noops"):
        golden_oft(unnorm_key=None).act(full_observation(1), True, None)


def test_problems_are_told_without_reading_weights(directory: Path) -> None:
    told = lambda checkpoint, **options: dict(problems(str(checkpoint), OpenVLAOFTSettings(**options)))  # noqa: E731
    assert told(directory, unnorm_key=LIBERO, **EVERYTHING) == {}
    assert told("openvla-oft-tiny", **EVERYTHING) == told("openvla-oft-tiny", **EVERYTHING, bounds="extremes") == {}
    assert "no directory, and no preset" in told("openvla-oft")["checkpoint"]
    assert "name the data set" in told(directory)["unnorm_key"]
    without_states(directory)
    assert "have no 'proprio'" in told(directory, unnorm_key=LIBERO, proprioception=True)["unnorm_key"]
    next(directory.glob("action_head--*")).unlink()
    assert "has no action_head--<step>_checkpoint.pt" in told(directory, unnorm_key=LIBERO, head="l1")["checkpoint"]
    lora = LoRASettings(targets=("fc9",))
    assert "match no trainable module: ['fc9']" in told(directory, unnorm_key=LIBERO, lora=lora)["lora"]
