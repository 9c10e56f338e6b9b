"""Adapters inside OpenVLA: where they go, what they freeze, how they are stored and merged."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import peft
import pytest
import torch
from openvla_golden import TINY, golden_policy, observation
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from policies import openvla
from policies.lora import LoRASettings, add_lora, describe, merged_state_dict
from policies.openvla import OpenVLAPolicy

EVERYWHERE = ("q_proj", "down_proj", "qkv", "patch_embed.proj", "projector.fc2", "lm_head", "embed_tokens")


def with_lora(**options: object) -> OpenVLAPolicy:
    lora = {"rank": 4, "alpha": 8.0, **options}
    return openvla.load(TINY, unnorm_key="bridge_golden", lora=lora)


def disturb(policy: OpenVLAPolicy) -> None:
    """Give the adapters an effect; they start without one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def probabilities(policy: OpenVLAPolicy) -> Tensor:
    seen = observation(2)
    token = golden_policy().act(seen, True, None).token
    return policy.evaluate(seen, token)[0].detach()


def test_a_new_adapter_changes_nothing_and_freezes_all_else() -> None:
    policy = with_lora(targets=EVERYWHERE)
    torch.testing.assert_close(probabilities(policy), probabilities(golden_policy()), rtol=0, atol=5e-5)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert all(".lora_" in name or name.startswith("critic.") for name in trained)
    before = {name: p.clone() for name, p in policy.named_parameters() if not p.requires_grad}
    seen = observation(2)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    for _ in range(2):
        logprob, _, value = policy.evaluate(seen, policy.act(seen, True, None).token)
        optimizer.zero_grad()
        (logprob.sum() + value.sum()).backward()
        optimizer.step()
    after = dict(policy.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(after[name].grad is not None for name in trained)


def test_the_targets_are_resolved_to_names_that_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="policies.lora"):
        policy = with_lora(targets=("q_proj", "qkv"))
    layers = [f"network.language_model.model.layers.{i}.self_attn.q_proj" for i in range(2)]
    blocks = [f"network.vision_backbone.featurizer.blocks.{i}.attn.qkv" for i in range(3)]
    blocks += [f"network.vision_backbone.fused_featurizer.blocks.{i}.attn.qkv" for i in range(2)]
    # The last block of each tower is not computed, so it has none.
    assert [f"network.{name}" for name in policy.adapted] == blocks + layers
    assert describe(policy.adapted) == [
        "vision_backbone.featurizer.blocks.*.attn.qkv x 3",
        "vision_backbone.fused_featurizer.blocks.*.attn.qkv x 2",
        "language_model.model.layers.*.self_attn.q_proj x 2",
    ]
    assert "language_model.model.layers.*.self_attn.q_proj x 2" in caplog.text


def test_a_target_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"match no trainable module: \['query'\]; last parts of names: .*q_proj, qkv"):
        with_lora(targets=("q_proj", "query"))
    with pytest.raises(ValueError, match="match no trainable module"):
        with_lora(targets=())
    with pytest.raises(ValueError, match=r"match no trainable module: \['attn_pool.q'\]"):  # is never computed
        with_lora(targets=("attn_pool.q",))


def test_part_of_a_name_is_no_match() -> None:
    module = nn.ModuleDict({"fc10": nn.Linear(2, 2), "inner": nn.ModuleDict({"fc1": nn.Linear(2, 2)})})
    assert add_lora(module, LoRASettings(rank=1, targets=("fc1",))) == ["inner.fc1"]


def test_a_frozen_module_gets_no_adapter_though_its_name_matches() -> None:
    module = nn.ModuleDict({"fc1": nn.Linear(2, 2), "inner": nn.ModuleDict({"fc1": nn.Linear(2, 2)})})
    module["inner"].requires_grad_(False)
    assert add_lora(module, LoRASettings(rank=1, targets=("fc1",))) == ["fc1"]


def test_adapters_are_float32_in_a_half_precision_network() -> None:
    policy = openvla.load(TINY, unnorm_key="bridge_golden", dtype="bfloat16", lora={"rank": 4})
    types = {name.split(".lora_")[0] == name: p.dtype for name, p in policy.network.named_parameters()}
    assert types == {True: torch.bfloat16, False: torch.float32}
    assert probabilities(policy).isfinite().all()


def test_merged_weights_act_like_the_adapter(tmp_path: Path) -> None:
    policy = with_lora(targets=EVERYWHERE)
    disturb(policy)
    assert (probabilities(policy) - probabilities(golden_policy())).abs().max() > 0.1
    assert merged_state_dict(policy.network).keys() == golden_policy().network.state_dict().keys()
    policy.save_pretrained(tmp_path / "merged")
    merged = openvla.load(tmp_path / "merged", unnorm_key="bridge_golden")
    torch.testing.assert_close(probabilities(merged), probabilities(policy), rtol=0, atol=2e-4)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, OpenVLAPolicy]:
    """An adapter as peft writes it."""
    base = openvla.load(TINY, unnorm_key="bridge_golden")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "qkv", "fc2", "lm_head", "embed_tokens"])
    model = peft.get_peft_model(base.network, config)
    disturb(base)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    return tmp_path / "adapter", base


def test_an_adapter_that_peft_wrote_is_loaded_and_trained_on(stored: tuple[Path, OpenVLAPolicy]) -> None:
    directory, original = stored
    policy = openvla.load(TINY, unnorm_key="bridge_golden", adapter=str(directory))
    torch.testing.assert_close(probabilities(policy), probabilities(original), rtol=0, atol=5e-5)
    trained = {name for name, p in policy.network.named_parameters() if p.requires_grad}
    assert {name.split(".lora_")[0] for name in trained} == set(policy.adapted)


def test_an_adapter_that_does_not_fit_names_every_key(stored: tuple[Path, OpenVLAPolicy]) -> None:
    directory, _ = stored
    file = directory / "adapter_model.safetensors"
    state = load_file(file)
    gone, short = sorted(state)[:2]
    del state[gone]
    state[short] = torch.zeros(3, 3)
    save_file(state, file)
    with pytest.raises(ValueError, match="does not fit") as error:
        openvla.load(TINY, adapter=str(directory))
    own = [key.removeprefix("base_model.model.").removesuffix(".weight") for key in (gone, short)]
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == 2
    assert f"missing: {own[0]}" in lines[0]
    assert f"misshapen: {own[1]}" in lines[1]
    assert "is [3, 3], expected [" in lines[1]


def test_a_directory_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no LoRA adapter: it has no adapter_config.json"):
        openvla.load(TINY, adapter=str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(FileNotFoundError, match="it has no adapter_model.safetensors"):
        openvla.load(TINY, adapter=str(tmp_path))
    with pytest.raises(ValueError, match="lora and adapter are given"):
        openvla.load(TINY, adapter=str(tmp_path), lora={"rank": 4})
