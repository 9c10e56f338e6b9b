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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "mine.json: text_config is None; expected a JSON object"),
        ({"image_sizes": 56}, "mine.json: image_sizes is 56; expected a list of whole numbers above 0"),
        ({"image_sizes": ["56", "56"]}, "image_sizes is "),
        ({"n_action_bins": None}, "mine.json: n_action_bins is None; expected a whole number"),
        ({"n_action_bins": 40000}, "mine.json: n_action_bins is 40000; expected 2 to 32000"),
        ({"pad_to_multiple_of": None}, "pad_to_multiple_of is None"),
        ({"pad_token_id": None}, "pad_token_id is None"),
        ({"norm_stats": [1]}, r"norm_stats is \[1\]; expected a JSON object"),
        ({"vision_backbone_id": []}, r"vision_backbone_id is \[\]; expected a text"),
        ({"torch_dtype": []}, r"torch_dtype is \[\]; expected a text"),
        ({"timm_model_ids": "vit"}, "timm_model_ids is 'vit'; expected a list of texts"),
        ({"vision_arguments": 5}, "vision_arguments is 5; expected a list of JSON objects"),
        ({"timm_override_act_layers": True}, "timm_override_act_layers is True; expected a list"),
        ({"text_config": {"hidden_size": "32"}}, "mine.json: text_config.hidden_size is '32'; expected a whole number"),
        ({"text_config": {"num_attention_heads": 0}}, "text_config.num_attention_heads is 0; expected a whole number"),
        ({"text_config": {"rms_norm_eps": "a"}}, "text_config.rms_norm_eps is 'a'; expected a number above 0"),
        ({"text_config": {"rope_parameters": 5}}, "text_config.rope_parameters is 5; expected a JSON object"),
        ({"text_config": {"rope_parameters": {"rope_theta": "a"}}}, "rope_parameters.rope_theta is 'a'"),
    ],
)
def test_a_value_of_another_kind_is_named_with_what_was_expected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenVLAConfig.from_dict({**REAL, **change}, "mine.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timm_model_ids": ["no_such_vit"] * 2}, "knows no vision tower 'no_such_vit'"),
        ({"vision_arguments": [{"bogus": 1}] * 2}, "vit_large_patch14_reg4_dinov2.lvd142m.*bogus"),
    ],
)
def test_a_vision_tower_that_timm_does_not_make_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), torch.device("meta"):
        OpenVLA(OpenVLAConfig.from_dict({**REAL, **change}))


def test_importing_policies_loads_no_model_library() -> None:
    heavy = ["transformers", "timm", "peft", "tokenizers", "torchvision"]
    code = f"import sys, policies; policies.openvla.load; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
