"""Recipes, faults and the dry run of `embodied-rl math`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from reasoning.cli import app
from reasoning.config import PRESETS
from reasoning.recipe import keys, load_recipe, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid_and_shows_its_memory_in_a_dry_run(name: str) -> None:
    result = CliRunner().invoke(app, ["train", name, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "sampler, keys and values" in result.output and "would write to runs/" in result.output


def test_the_memory_of_qwen_7b_with_adapters_is_that_of_its_parameters() -> None:
    output = CliRunner().invoke(app, ["train", "qwen2.5_7b_math", "--dry-run"]).output
    assert "the published shape of Qwen2.5-7B" in output
    assert "7,615,283,200 parameters x 2 bytes" in output  # 7.616 B published, without its biases and norms


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("sampling.group=4", "sampling.group_size"),
        ("sampling.group_size=1", "greater than or equal to 2"),
        ("algorithm.name=grop", "'grpo'"),
        ("data.train=arithmetic:9", "arithmetic:"),
        ("placement=actor: 0", "no devices given for sampler, judge"),
        ("reward.overlong_buffer=99", "sampling.max_new_tokens"),
        ("nothing", "key=value"),
    ],
)
def test_faults_name_the_key_and_what_was_expected(override: str, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["train", "tiny_addition", override, "--dry-run"])
    assert result.exit_code == 2
    assert told in " ".join((result.output + capfd.readouterr().err).split())


def test_numbers_in_scientific_notation_are_numbers() -> None:
    config, faults = load_recipe("tiny_addition", ["algorithm.lr=2e-5", "algorithm.weight_decay=1.5e-2"])
    assert not faults and (config.algorithm.lr, config.algorithm.weight_decay) == (2e-5, 0.015)


@pytest.mark.parametrize("name", PRESETS)
def test_an_algorithm_fills_in_what_was_not_given(name: str) -> None:
    config, faults = load_recipe("tiny_addition", [f"algorithm.name={name}", "algorithm.clip_low=0.11"])
    assert not faults and config.algorithm.clip_low == 0.11
    preset = {key: value for key, value in PRESETS[name].items() if key != "clip_low"}
    assert {key: getattr(config.algorithm, key) for key in preset} == preset
    assert config.algorithm.ratio_level is not None and config.algorithm.loss is not None


def test_a_resolved_configuration_can_be_read_again(tmp_path: Path) -> None:
    import yaml

    config, _ = load_recipe("tiny_addition", ["reward.functions={accuracy: 1.0, format: 0.1}"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_recipe(str(tmp_path), []) == (config, [])
    assert set(keys()) >= {"reward.functions", "algorithm.lr", "sampling.max_rows"}
