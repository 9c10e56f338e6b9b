"""What is wrong with an OpenVLA policy or with demonstrations is told before a process starts, with its key."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("timm", reason="the extra vla is not installed")

from picture_env import ENV, write_demonstrations

from embodied_rl.build import policy_options
from embodied_rl.config import Config, OpenVLAConfig, OpenVLAOFTConfig, PolicyConfig
from embodied_rl.demonstration_faults import demonstration_faults, unused_demonstrations
from embodied_rl.dry_run import make_plan, print_dry_run, vla_estimate
from embodied_rl.policy_faults import policy_faults
from embodied_rl.recipe import load_recipe
from embodied_rl.vla import VLA
from policies import openvla_oft
from policies.openvla import OpenVLASettings
from policies.openvla_oft import OpenVLAOFTSettings

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "openvla" / "tiny"
RECIPE = "maniskill_openvla_tiny_sft"


def faults(**openvla: Any) -> dict[str, str]:
    """The problems by key of a policy on the golden checkpoint."""
    options = {"checkpoint": str(GOLDEN), "unnorm_key": "bridge_golden", **openvla}
    config = Config(env=ENV, policy={"kind": "openvla", "openvla": options})
    return {fault.key.removeprefix("policy.openvla."): fault.problem for fault in policy_faults(config)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "checkpoint"))


def edit_config(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_sound_checkpoints_have_no_fault() -> None:
    assert faults() == {}
    assert faults(checkpoint="openvla-tiny", unnorm_key=None, lora_rank=2) == {}


@pytest.mark.parametrize(
    ("openvla", "key", "problem"),
    [
        ({"unnorm_key": "bridge"}, "unnorm_key", "'bridge' in the checkpoint; known: bridge_golden, libero_golden"),
        ({"unnorm_key": None}, "unnorm_key", "name the data set (unnorm_key)"),
        ({"checkpoint": "/nowhere"}, "checkpoint", "/nowhere is no directory, and no preset; presets: openvla-tiny"),
        ({"tokenizer": "/nowhere"}, "tokenizer", "/nowhere has no tokenizer.json"),
        ({"lora_rank": 4, "lora_targets": ("q_porj",)}, "lora_targets", "match no trainable module: ['q_porj']"),
        ({"adapter": "/nowhere"}, "adapter", "/nowhere is no LoRA adapter"),
        ({"reuse_features": True}, "reuse_features", "vision_backbone.featurizer.cls_token, which is trained"),
        ({"reuse_features": True, "lora_rank": 2, "lora_targets": ("qkv",)}, "lora_targets", "is trained"),
        ({"lora_rank": 4, "frozen": ("projector",)}, "policy.openvla", "lora and frozen are given"),
    ],
)
def test_faults_of_options_are_told_with_their_key(openvla: dict[str, Any], key: str, problem: str) -> None:
    found = faults(**openvla)
    assert list(found) == [key] and problem in found[key]


def test_a_checkpoint_without_tokenizer_or_weights_or_of_another_architecture(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    dropped = weights.popitem()[0]
    save_file(weights, checkpoint / "model.safetensors")
    (checkpoint / "tokenizer.json").unlink()
    found = faults(checkpoint=str(checkpoint))
    assert f"missing: {dropped}" in found["checkpoint"] and "no tokenizer.json" in found["tokenizer"]
    (checkpoint / "model.safetensors").unlink()
    assert "has no model.safetensors" in faults(checkpoint=str(checkpoint))["checkpoint"]
    edit_config(checkpoint, model_type="llava")
    assert "llava" in faults(checkpoint=str(checkpoint))["checkpoint"]


def test_damaged_files_of_a_checkpoint_are_named(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (checkpoint / "tokenizer.json").write_text("{")
    edit_config(checkpoint, norm_stats={"bridge_golden": {"action": {"q99": [1.0] * 7}}})
    (checkpoint / "dataset_statistics.json").unlink(missing_ok=True)
    found = faults(checkpoint=str(checkpoint))
    assert "model.safetensors is damaged" in found["checkpoint"]
    assert "tokenizer.json is no tokenizer" in found["tokenizer"]
    assert found["unnorm_key"] == "the action statistics of 'bridge_golden' have no q01"


@pytest.mark.parametrize("name", ["config.json", "dataset_statistics.json", "policy_settings.json"])
@pytest.mark.parametrize(("content", "problem"), [("{", "is no JSON"), ("[1]", "holds a list")])
def test_damaged_descriptions_of_a_checkpoint_are_named(
    checkpoint: Path, name: str, content: str, problem: str
) -> None:
    (checkpoint / name).write_text(content)
    assert f"{name} {problem}" in faults(checkpoint=str(checkpoint))["checkpoint"]


def test_a_setting_that_this_version_does_not_know_is_named(checkpoint: Path) -> None:
    (checkpoint / "policy_settings.json").write_text('{"kind": "openvla", "wings": 2}')
    assert "wings 2" in faults(checkpoint=str(checkpoint))["checkpoint"]


@pytest.mark.parametrize(
    ("override", "key", "problem"),
    [
        ("policy.chunk=2", "policy.chunk", "one action at a time"),
        ("env.observation=[state]", "env.observation", "sees images"),
        ("policy.hidden=[8]", "policy.hidden", "the openvla policy does not have it"),
        ("policy.kind=cnn policy.openvla.view=1", "policy.openvla.view", "only OpenVLA has it"),
        ("policy.openvla.lora.rank=4", "policy.openvla.lora.rank", "no such key"),
        ("policy.openvla.dtype=float16", "policy.openvla.dtype", "expected one of float32, bfloat16"),
        ("policy.openvla.top_p=2", "policy.openvla.top_p", "expected a number"),
        ("policy.kind=openvla_oft policy.openvla.view=1", "policy.openvla.view", "only OpenVLA has it"),
        ("policy.openvla_oft.film=true", "policy.openvla_oft.film", "only OpenVLA-OFT has it"),
        ("policy.kind=openvla_oft policy.openvla_oft.head=l1", "policy.openvla_oft.head", "can be evaluated only"),
        ("policy.kind=openvla_oft policy.openvla_oft.value_of=action", "algorithm.ratio_level", "each action an advan"),
        (
            "policy.kind=openvla_oft policy.openvla_oft.proprioception=true",
            "env.observation",
            "the openvla_oft policy sees the state and images",
        ),
    ],
)
def test_faults_between_and_in_keys(override: str, key: str, problem: str) -> None:
    found = {fault.key: fault.problem for fault in load_recipe(RECIPE, override.split())[1]}
    assert problem in found[key]


def test_a_checkpoint_that_training_left_is_used_as_it_was_trained(tmp_path: Path) -> None:
    openvla_oft.load("openvla-oft-tiny", chunk=3, layout="rlinf").save_pretrained(tmp_path)
    oft = {"checkpoint": str(tmp_path), "layout": "rlinf"}

    def found(kind: str = "openvla_oft", chunk: int = 3, **changes: Any) -> dict[str, str]:
        policy = {"kind": kind, "chunk": chunk, kind: {**oft, **changes}}
        return {fault.key: fault.problem for fault in policy_faults(Config(env=ENV, policy=policy))}

    assert found() == {}
    assert found(chunk=8, layout="official") == {
        "policy.chunk": f"{tmp_path} was trained with 3",
        "policy.openvla_oft.layout": f"{tmp_path} was trained with rlinf",
    }
    del oft["layout"]
    assert list(found("openvla", 1)) == ["policy.kind"]


def test_nested_keys_are_read_from_recipes_and_the_command_line() -> None:
    config, found = load_recipe(RECIPE, ["policy.openvla.lora_rank=4", "policy.openvla.frozen=[]"])
    assert found == [] and config.policy.kind == "openvla"
    assert (config.policy.openvla.lora_rank, config.policy.openvla.checkpoint) == (4, "openvla-tiny")
    assert policy_options(config.policy)["lora"]["rank"] == 4


@pytest.mark.parametrize(
    ("kind", "section", "settings", "elsewhere"),
    [
        ("openvla", OpenVLAConfig, OpenVLASettings, set()),
        ("openvla_oft", OpenVLAOFTConfig, OpenVLAOFTSettings, {"chunk"}),
    ],
)
def test_options_are_those_of_the_policy(kind: str, section: Any, settings: Any, elsewhere: set[str]) -> None:
    own = set(section.model_fields) - {"checkpoint", "lora_rank", "lora_alpha", "lora_targets"}
    assert own | {"lora"} | elsewhere == {field.name for field in fields(settings)}
    options = policy_options(PolicyConfig(kind=kind))
    del options["checkpoint"]
    assert settings(**{**vars(settings.from_options(options)), "prompt_length": None}) == settings()


def test_weights_of_the_published_sizes_are_to_be_given_and_a_dry_run_does_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    oft = {"checkpoint": "openvla-oft-7b", "unnorm_key": "libero_object", "prompt_length": 32}
    config = Config(
        env={**ENV, "num_envs": 64},
        policy={"kind": "openvla_oft", "chunk": 8, "openvla_oft": oft},
        rollout={"steps": 40, "epochs": 2, "pipeline_stages": 1},
        algorithm={"micro_batch": 8, "epochs": 1},
        cluster={"cpu_slots": 2},
    )
    (fault,) = policy_faults(config)
    assert fault.key == "policy.openvla_oft.checkpoint" and "its weights are yours to give" in fault.problem
    assert fault.obtainable
    print_dry_run(config, Path("runs/one"), False, [fault])
    said = capsys.readouterr().out
    assert (
        "Still needed" in said and "openvla-oft-7b stands for" in said and "policy.openvla_oft.checkpoint=DIR" in said
    )
    assert "1 GPU   actor" in said and "8 GPUs  actor" in said and "do not fit" in said, "all weights and Adam in 80 GB"
    found = {name: float(re.findall(rf"  {name} +([\d.]+) (?:GB|s) ", said)[0]) for name in ("rollout", "acting")}
    assert found["rollout"] == pytest.approx(15.1, abs=0.1), "nothing is cached"
    flops_of_a_call = (found["acting"] / 10 - found["rollout"] * 1e9 / 10e9) * 50e9
    assert flops_of_a_call == pytest.approx(64 * 2 * 7e9 * (256 + 32 + 56 + 1), rel=0.15), "one pass for all actions"


# ---------------------------------------------------------------------------------------------- demonstrations


def with_data(path: Path | str | None, **env: Any) -> Config:
    return Config(env={**ENV, **env}, policy={"kind": "openvla"}, sft={"data": path and str(path)})


def test_demonstrations_that_do_not_serve_are_told(tmp_path: Path) -> None:
    data = tmp_path / "demos"
    write_demonstrations(data, with_data(None), episodes=1)

    def problems(config: Config) -> str:
        return "; ".join(fault.problem for fault in demonstration_faults(config))

    assert "no demonstrations; give their directory" in problems(with_data(None))
    assert "holds no demonstrations: no dataset.json" in problems(with_data(tmp_path))
    assert "one episode, and at least one is held out" in problems(with_data(data))
    write_demonstrations(tmp_path / "more", with_data(None), episodes=2)
    assert problems(with_data(tmp_path / "more", horizon=9, num_envs=2)) == ""
    other = with_data(tmp_path / "more", instruction="go")
    assert 'of another env: env.instruction was null, not "go"' in problems(other)
    assert "have no images" in problems_without_images(tmp_path / "more", problems)
    state = Config(env={**ENV, "observation": ["state"]}, sft={"data": str(tmp_path / "more")})
    assert "only policies with action tokens" in problems(state)
    assert [fault.key for fault in unused_demonstrations(other)] == ["sft.data"]


def problems_without_images(data: Path, problems: Any) -> str:
    settings = json.loads((data / "dataset.json").read_text())
    (data / "dataset.json").write_text(json.dumps({**settings, "image_format": None}))
    return problems(with_data(data))


# ---------------------------------------------------------------------------------------------- dry run


def test_a_dry_run_estimates_memory_and_time_of_the_published_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "openvla", "torch_dtype": "bfloat16"}))
    openvla = {"checkpoint": str(tmp_path), "lora_rank": 32, "gradient_checkpointing": True, "prompt_length": 32}
    config = Config(
        env={**ENV, "num_envs": 64},
        policy={"kind": "openvla", "openvla": openvla},
        rollout={"steps": 80, "pipeline_stages": 1},
        algorithm={"micro_batch": 8, "epochs": 1},
        cluster={"cpu_slots": 2},
    )
    estimate = vla_estimate(config, VLA.of(config.policy), make_plan(config))
    found = {name: (value, text) for name, value, text in estimate}
    assert found["actor"][0] == pytest.approx(18.1, abs=0.1) and found["rollout"][0] == pytest.approx(25.3, abs=0.1)
    assert "of 8 samples" in found["actor"][1] and "of 64 envs" in found["rollout"][1]
    flops_of_a_sample = found["learning"][0] * 50e9 / (80 * 64) / 3
    assert flops_of_a_sample == pytest.approx(2 * 7e9 * (256 + 32 + 6), rel=0.1), "2 for each parameter and token"


def test_a_dry_run_shows_where_adapters_go_and_what_an_iteration_is(capsys: pytest.CaptureFixture[str]) -> None:
    openvla = {"lora_rank": 4, "lora_targets": ("q_proj", "projector.fc1")}
    policy = {"kind": "openvla", "openvla": openvla}
    config = Config(env=ENV, policy=policy, sft={"data": "demos", "batch": 32, "steps": 7}, cluster={"cpu_slots": 2})
    print_dry_run(config, Path("runs/one"), resume=False)
    said = capsys.readouterr().out
    assert "adapters on projector.fc1 x 1" in said and "layers.*.self_attn.q_proj x 2" in said
    assert f"rollout buffer     0.001 GB = 144 chunk steps x {56 * 56 * 3 + 64 * 8 + 8 * 12 + 7 + 8} bytes" in said
    assert "7 optimiser steps an iteration on 32 decisions each" in said and "7 optimiser steps on 32 samples" in said
