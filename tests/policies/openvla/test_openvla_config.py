"""Reading `config.json`: the defaults it leaves out, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from openvla_golden import DATA, TINY

from policies.openvla.config import ConfigError, LlamaConfig, OpenVLAConfig
from policies.openvla.model import OpenVLA

REAL = json.loads((DATA / "real_openvla7b_config_expected.json").read_text())


def test_the_published_model_has_the_published_tensors() -> None:
    with torch.device("meta"):
        network = OpenVLA(OpenVLAConfig.from_dict(REAL))
    expected = json.loads((DATA / "real_state_dict_shapes.json").read_text())
    assert {key: list(value.shape) for key, value in network.state_dict().items()} == expected
    assert sum(parameter.numel() for parameter in network.parameters()) == 7_541_237_184


def test_what_the_published_configuration_leaves_out() -> None:
    config = OpenVLAConfig.from_dict(REAL)
    assert config.text == LlamaConfig(vocab_size=32064)
    assert (config.vocab_size, config.num_bins, config.pad_token_id) == (32000, 256, 32000)
    assert (config.image_size, config.resize_strategy, config.dtype) == (224, "resize-naive", torch.bfloat16)
    shortest = OpenVLAConfig.from_dict({"model_type": "openvla", "vision_backbone_id": "dinosiglip-vit-so-224px"})
    assert (shortest.timm_ids, shortest.image_size, shortest.text) == (config.timm_ids, 224, config.text)


def test_a_model_with_one_vision_tower_has_a_shorter_projector() -> None:
    with torch.device("meta"):
        network = OpenVLA(OpenVLAConfig.from_dict({"model_type": "openvla", "vision_backbone_id": "siglip-vit-so400m"}))
    assert [list(layer.weight.shape) for layer in network.projector.children()] == [[4096, 1152], [4096, 4096]]


def test_grouped_keys_and_rotary_base_are_read_from_old_and_new_files() -> None:
    old = LlamaConfig.from_dict({"num_key_value_heads": 8, "rope_theta": 5e5})
    new = LlamaConfig.from_dict({"num_key_value_heads": 8, "rope_parameters": {"rope_theta": 5e5}})
    assert old == new == LlamaConfig(num_key_value_heads=8, rope_theta=5e5)


def test_statistics_beside_the_configuration_replace_those_in_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())
    assert set(OpenVLAConfig.read(tmp_path).norm_stats) == {"libero_golden_no_noops", "bridge_golden"}
    (tmp_path / "dataset_statistics.json").write_text('{"mine": {}}')
    assert set(OpenVLAConfig.read(tmp_path).norm_stats) == {"mine"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llava"}, "a model of type 'llava'; expected 'openvla'"),
        ({"model_type": None}, "a model of type None; expected 'openvla'"),
        ({"text_config": {"model_type": "mistral"}}, "text_config.model_type is 'mistral'; only 'llama'"),
        ({"text_config": {"rope_scaling": {"type": "linear"}}}, "text_config.rope_scaling"),
        ({"text_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
        ({"text_config": {"attention_bias": True}}, "text_config.attention_bias is True"),
        ({"vision_backbone_id": "clip", "timm_model_ids": None}, "unknown vision backbone 'clip'; known: dinosiglip"),
        ({"image_sizes": [224, 384]}, r"image_sizes \[224, 384\] differ"),
        ({"torch_dtype": "int8"}, "unknown torch_dtype 'int8'; known: float32"),
        ({"timm_override_act_layers": ["quick_gelu", None]}, "timm_override_act_layers"),
        ({"vision_arguments": [{}]}, "1 sets of vision arguments for 2 towers"),
    ],
)
def test_another_architecture_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenVLAConfig.from_dict({**REAL, **change})


def test_importing_policies_loads_no_model_library() -> None:
    heavy = ["transformers", "timm", "peft", "tokenizers", "torchvision"]
    code = f"import sys, policies; policies.openvla.load; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
