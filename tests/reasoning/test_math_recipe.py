"""Recipes, faults and dry runs of language models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from embodied_rl.checkpoint import save_checkpoint
from embodied_rl.cli import app
from embodied_rl.kinds import kind_of, kinds
from embodied_rl.schema import all_keys
from reasoning import cli
from reasoning.config import PRESETS, MathConfig
from reasoning.recipe import RECIPES, load_recipe


def dry_run(*words: str) -> int:
    return cli.train(list(words), resume=False, dry_run=True, command="")


@pytest.mark.parametrize("name", RECIPES.names())
def test_every_recipe_is_valid_and_has_memory_and_plans_in_a_dry_run(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(name) == 0
    output = capsys.readouterr().out
    assert "sampler, keys and values" in output and "would write to runs/" in output
    if name.startswith(("qwen", "olmoe")):
        plans = [line.split(" GPUs ") for line in output.splitlines() if " GPUs  " in line]
        assert [int(count) for count, _ in plans] == [8, 16, 32, 64]
        assert all("s an iteration" in plan for _, plan in plans)


def test_the_memory_of_published_shapes_is_that_of_their_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    dry_run("qwen2.5_7b_math")
    assert "7,615,283,200 parameters x 2 bytes" in capsys.readouterr().out  # 7.616 B published, with biases and norms
    dry_run("olmoe_1b_7b_math")
    assert "6,919,028,736 parameters x 2 bytes" in capsys.readouterr().out  # 6.92 B published


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("sampling.group=4", "sampling.group_size"),
        ("sampling.group_size=1", "an integer >= 2"),
        ("algorithm.name=grop", "nearest valid: grpo"),
        ("data.train=arithmetic:9", "arithmetic:"),
        ("placement=actor: 0", "no devices given for sampler, judge"),
        ("reward.overlong_buffer=99", "sampling.max_new_tokens"),
        ("algorithm.refill=2", "no group is left out"),
        ("sampling={ahead: 1}", ""),
        ("algorithm={elastic: true, minibatches: 2}", "needs the whole batch"),
        ("algorithm={elastic: true, name: gspo, aggregation: token-mean, kl_coef: 0.1}", "needs the whole batch"),
        ("algorithm={name: cispo, ratio_level: sequence}", "the loss cispo weights each token"),
        ("algorithm={importance_cap: null}", ""),
        ("algorithm={name: ppo, group_advantage: rloo}", "ppo has its advantages from a critic"),
        ("algorithm={name: cispo, dual_clip: 3}", "the loss cispo has no second clip"),
        ("algorithm={name: grpo, dual_clip: 3}", ""),
        ("reward.functions={acuracy: 1}", "nearest: accuracy"),
        ("reward.functions={}", "reward.functions"),
        ("sampling.engine=vllm", "pip install vllm"),
        ("nothing", "key=value"),
    ],
)
def test_faults_name_the_key_and_what_was_expected(
    override: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run("tiny_addition", override) == (2 if told else 0)
    assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", PRESETS)
def test_an_algorithm_fills_in_what_was_not_given(name: str) -> None:
    config, faults = load_recipe("tiny_addition", [f"algorithm.name={name}", "algorithm.clip_low=0.11"])
    assert not faults and config.algorithm.clip_low == 0.11
    preset = {key: value for key, value in PRESETS[name].items() if key != "clip_low"}
    assert {key: getattr(config.algorithm, key) for key in preset} == preset
    assert config.algorithm.ratio_level is not None and config.algorithm.loss is not None


def test_a_resolved_configuration_can_be_read_again_and_is_known_by_its_sections(tmp_path: Path) -> None:
    config, _ = load_recipe("tiny_addition", ["reward.functions={accuracy: 1.0, format: 0.1}", "algorithm.lr=2e-5"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_recipe(str(tmp_path), []) == (config, []) and config.algorithm.lr == 2e-5
    assert "reward.functions" in all_keys(MathConfig)
    assert kind_of(str(tmp_path)) is kind_of("tiny_addition") is kinds()["math"]
    assert kind_of("smollm2_aritmetic") is kinds()["math"] and kind_of("cartpole_ppo") is None
    assert kind_of(str(tmp_path / "nowhere.yaml")) is None


@pytest.mark.parametrize("option", ["--resume", "--wandb=offline", "--seed=0", "--episodes=5"])
def test_options_that_a_benchmark_does_not_have_are_refused(option: str) -> None:
    result = CliRunner().invoke(app, ["eval", "tiny_addition", "--benchmark", "digits:1", option])
    assert result.exit_code == 2 and f"{option.partition('=')[0]} = " in result.output


def test_an_evaluation_names_what_is_wrong_with_its_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.evaluate(["tiny_addition"], "problems.txt", 1, 1.0, None) == 2
    assert "data.test = problems.txt: neither a .jsonl or .parquet file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.lora_rank=4"], "model.lora_rank = 4: a resumed run keeps its network; it was null in step_000010"),
        (["sampling.group_size=4"], "sampling.group_size = 4: a resumed run keeps its run; it was 8 in step_000010"),
        (["train.iterations=500", "algorithm.token_budget=1024", "reward.processes=2"], None),
    ],
)
def test_a_resumed_run_may_be_longer_and_elsewhere_but_learns_the_same(
    overrides: list[str], told: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = load_recipe("tiny_addition", [])[0].model_dump(mode="json")
    run_dir = tmp_path / "tiny_addition"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(yaml.safe_dump(stored))
    save_checkpoint(run_dir, 10, {"policy": {"w": torch.ones(1)}}, {}, stored, keep=1)
    words = ["tiny_addition", f"run_root={tmp_path}", *overrides]
    code = cli.train(words, resume=True, dry_run=True, command="")
    if told is None:
        assert code == 0 and f"would write to {run_dir}" in capsys.readouterr().out
    else:
        assert code == 2 and told in capsys.readouterr().err


def test_there_must_be_a_run_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.train(["tiny_addition", f"run_root={tmp_path}"], resume=True, dry_run=True, command="") == 2
    assert f"nothing to resume: {tmp_path / 'tiny_addition'} does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.train=nowhere.jsonl", "data.train = nowhere.jsonl: does not exist"),
        ("model.path=nowhere", "model.path = nowhere: holds no config.json"),
        ("reward.functions={nowhere:reward: 1.0}", "'nowhere:reward' cannot be imported"),
    ],
)
def test_what_is_not_here_is_told_by_a_dry_run_and_keeps_a_run_from_starting(
    override: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["qwen2.5_1.5b_gsm8k", f"run_root={tmp_path}", override]
    assert cli.train(words, resume=False, dry_run=True, command="") == 0
    assert told in capsys.readouterr().out.partition("still needed")[2]
    assert cli.train(words, resume=False, dry_run=False, command="") == 2
    assert told in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_bad_line_is_told_before_a_run_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "problems.jsonl"
    data.write_text('{"prompt": "1+1", "answer": "2"}\nnot JSON\n')
    for is_dry in (True, False):
        words = ["tiny_addition", f"run_root={tmp_path}/runs", f"data.train={data}"]
        assert cli.train(words, resume=False, dry_run=is_dry, command="") == 2
        said = capsys.readouterr().err
        assert "data.train" in said and "line 2" in said and "data.skip_bad_lines=true" in said
    assert dry_run(*words, "data.skip_bad_lines=true") == 0 and not (tmp_path / "runs").exists()


def test_a_reward_function_may_lie_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "brevities.py").write_text("def brevity(**_): ...")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    words = ["tiny_addition", "reward.functions={brevities:brevity: 1.0}"]
    assert cli.train(words, resume=False, dry_run=True, command="") == 0
    assert "still needed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "benchmark", "told"),
    [("seed=0", "nowhere.jsonl", "nowhere.jsonl does not exist"), ("model.path=nowhere", "digits:1", "no config.json")],
)
def test_an_evaluation_says_what_cannot_be_read(
    override: str, benchmark: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.evaluate(["tiny_addition", override], benchmark, 1, 1.0, tmp_path) == 2
    assert told in capsys.readouterr().err


def test_benchmarks_of_the_same_name_have_results_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def run_benchmark(config: MathConfig, samples: int, temperature: float, out: Path) -> int:
        (out / "result.json").write_text(config.data.test)
        return 0

    monkeypatch.setattr("reasoning.benchmark.run_benchmark", run_benchmark)
    for name in ("aime/test.jsonl", "math/test.jsonl"):
        assert cli.evaluate(["tiny_addition"], name, 1, 1.0, None) == 0
    first, second = (Path("evaluations", f"tiny_addition_test{suffix}") for suffix in ("", "-2"))
    assert (first / "result.json").read_text() == "aime/test.jsonl"
    assert (second / "result.json").read_text() == "math/test.jsonl"
    for out, told in ((first, "is not empty"), (Path("/proc/x"), "cannot be written")):
        assert cli.evaluate(["tiny_addition"], "math/test.jsonl", 1, 1.0, out) == 2
        assert f"--out = {out}: {told}" in capsys.readouterr().err
    assert (first / "result.json").read_text() == "aime/test.jsonl"


def test_an_evaluation_that_ends_while_it_is_loaded_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning.benchmark", None)  # its import raises, as a signal meanwhile would
    with pytest.raises(ImportError):
        cli.evaluate(["tiny_addition"], "digits:1", 1, 1.0, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_directory_of_problems_is_told_from_a_file_that_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").mkdir()
    assert dry_run("tiny_addition", f"data.train={tmp_path}/p.jsonl", f"data.test={tmp_path}/q.jsonl") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "p.jsonl: is a directory" in told and "q.jsonl: does not exist" in told
