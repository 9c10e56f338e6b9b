"""Language model and vision towers of other sizes, against transformers and timm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from openvla_golden import golden_policy

from policies.openvla.config import LlamaConfig, OpenVLAConfig
from policies.openvla.llama import Attention, Llama
from policies.openvla.vision import VisionBackbone

torch.set_num_threads(1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6},
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_theta": 5e5,
            "rms_norm_eps": 1e-5,
        },
        {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16},
    ],
)
@torch.no_grad()
def test_llama_is_that_of_transformers(sizes: dict[str, Any], attention: Attention) -> None:
    text = {"vocab_size": 50, "intermediate_size": 72, "num_hidden_layers": 3, **sizes}
    ours = Llama(LlamaConfig.from_dict(text), attention)
    rope = {"rope_type": "default", "rope_theta": text.pop("rope_theta", 1e4)}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text, rope_parameters=rope))
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = theirs(ids).logits

    embedded, positions = ours.model.embed_tokens(ids), torch.arange(9).expand(2, -1)
    causal = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    hidden, _ = ours.model(embedded, positions, causal)
    torch.testing.assert_close(ours.logits(hidden), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.logits(hidden, slice(10, 20)), expected[..., 10:20], rtol=0, atol=1e-5)

    first, cache = ours.model(embedded[:, :5], positions[:, :5], causal[:, :, :5, :5])
    second, _ = ours.model(embedded[:, 5:], positions[:, 5:], causal[:, :, 5:], cache)
    torch.testing.assert_close(ours.logits(torch.cat([first, second], dim=1)), expected, rtol=0, atol=1e-5)


def test_gradients_through_cached_keys_and_values_are_those_of_one_pass_of_transformers() -> None:
    """A loss on the last four of nine tokens, which were read on top of the first five."""
    text = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text))
    ours = Llama(LlamaConfig.from_dict({**text, "num_key_value_heads": 4}), "sdpa")
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    weight = torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(1))
    (theirs(ids).logits[:, 5:].log_softmax(-1) * weight).sum().backward()

    embedded, positions = ours.model.embed_tokens(ids), torch.arange(9).expand(2, -1)
    causal = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    _, cache = ours.model(embedded[:, :5], positions[:, :5], causal[:, :, :5, :5])
    hidden, _ = ours.model(embedded[:, 5:], positions[:, 5:], causal[:, :, 5:], cache)
    (ours.logits(hidden).log_softmax(-1) * weight).sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("patch", [8, 14])
@torch.no_grad()
def test_features_are_those_of_timm_without_the_last_block(patch: int) -> None:
    size = 4 * patch
    arguments = [
        {"patch_size": patch, "embed_dim": 24, "depth": 5, "num_heads": 3, "init_values": 0.3, "reg_tokens": 2},
        {"patch_size": patch, "embed_dim": 16, "depth": 2, "num_heads": 2, "class_token": False, "global_pool": "map"},
    ]
    written = golden_policy().config.written
    raw = {**written, "image_sizes": [size, size], "vision_arguments": arguments}
    backbone = VisionBackbone(OpenVLAConfig.from_dict(raw), "sdpa").eval()
    pixels = torch.randn(2, 6, size, size, generator=torch.Generator().manual_seed(0))
    expected = torch.cat(
        [
            tower.get_intermediate_layers(x, n=[len(tower.blocks) - 2])[0]
            for tower, x in zip(backbone.towers, pixels.split(3, dim=1), strict=True)
        ],
        dim=-1,
    )
    torch.testing.assert_close(backbone(pixels), expected, rtol=0, atol=1e-5)
    assert (backbone.num_patches, backbone.width) == (16, 40)
