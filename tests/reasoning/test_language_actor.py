"""What a language actor makes of groups: numbers worked out by hand, and ways of learning that must agree."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import learner, scored

from embodied_rl.sums import Sums
from reasoning.actor import LanguageActor, _answer_ids
from reasoning.batch import samples_of
from reasoning.config import ModelConfig
from reasoning.data import Problem
from reasoning.generate import Generator, Request
from reasoning.models import LanguageModel, load_tokenizer
from reasoning.packing import Sample, cut, token_scores
from reasoning.samples import Group, Sampling
from scheduler.cluster import Cluster
from scheduler.executor import Executor
from scheduler.flow import Flow
from scheduler.placement import parse_placement

torch.set_num_threads(1)
RAGGED = [([5, 6], [[7], [8, 9, 4]]), ([9], [[3, 3], [4], [6, 6, 6, 6]]), ([4, 4, 4], [[5], [5, 8]])]


def tiny(has_critic: bool = False, **model: Any) -> LanguageModel:
    return LanguageModel(ModelConfig(**{"path": "tiny", **model}), trains=True, seed=0, has_critic=has_critic)


def of_the_model(groups: list[Group], actor: LanguageActor, apart: float = 0.0) -> list[Group]:
    """The same groups with the log-probs that the actor's model gives, or others that far from them."""
    completions = [completion for group in groups for completion in group.completions]
    for completion, logprob in zip(completions, actor._score(actor.policy, samples_of(groups))[0], strict=True):
        completion.logprobs = (logprob - apart).tolist()
    return groups


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_learning_from_groups_as_they_come_is_learning_from_the_batch(name: str) -> None:
    found = []
    for elastic in (False, True):
        actor = learner(name, tiny(), lr=1e-2, elastic=elastic)
        if elastic:
            for group in scored(RAGGED):
                actor.accumulate([group])
        metrics = actor.update(scored(RAGGED)).report["metrics"]
        found.append((metrics, torch.cat([p.grad.flatten() for p in actor.policy.parameters()])))
    (whole, expected), (by_group, gradients) = found
    assert by_group == pytest.approx(whole, abs=1e-5)
    assert torch.allclose(gradients, expected, atol=1e-6) and bool(expected.any())


def test_a_warm_start_learns_answers_without_a_token_that_begins_a_text() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer("tiny")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 2)])
    plain = load_tokenizer("tiny").encode("12")
    assert tokenizer.encode("12") == [2, *plain]
    assert _answer_ids(tokenizer, Problem("p", "6+6?", "12")) == [*plain, tokenizer.eos_token_id]


def test_new_adapters_are_decided_by_the_seed() -> None:
    first, second, other = (
        LanguageModel(ModelConfig(path="tiny", lora_rank=2), trains=True, seed=seed).learned_state()
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert any(not torch.equal(value, other[name]) for name, value in first.items())


def test_weights_correct_for_an_older_sampler_up_to_the_cap() -> None:
    groups = scored([([5], [[7], [8]])])
    actor = learner("dr_grpo", tiny(), importance_cap=2.0)
    own, _ = actor._score(actor.policy, samples_of(groups))
    for completion, logprob, ratio, reward in zip(groups[0].completions, own, [3.0, 0.5], [1.0, 0.0], strict=True):
        completion.logprobs, completion.reward = [float(logprob) - math.log(ratio)], reward
    metrics = actor.update(groups).report["metrics"]
    assert metrics["sampling/importance_weight"] == pytest.approx((2.0 + 0.5) / 2)
    assert metrics["losses/policy"] == pytest.approx(-(2.0 * 0.5 - 0.5 * 0.5) / (2 * 9))  # 9: max_new_tokens


def test_completions_older_than_allowed_are_refused() -> None:
    actor = learner("grpo", tiny())
    actor.iteration = 1
    with pytest.raises(RuntimeError, match="iteration 1 was given completions of version 0"):
        actor.update(scored(RAGGED))


def test_a_critic_that_expects_nothing_gives_advantages_by_hand() -> None:
    actor = learner("ppo", tiny(has_critic=True), lam=0.5, value_lr=1e-3)
    groups = scored([([5], [[7, 8, 9], [4, 6]])])
    for completion, reward in zip(groups[0].completions, [1.0, 0.0], strict=True):
        completion.reward = reward
    batch, _ = actor._judge(groups)
    assert batch.advantage.tolist() == [[0.25, 0.5, 1.0], [0.0, 0.0, 0.0]] == batch.returns.tolist()
    whitened = actor._learnable(groups, Sums()).advantage
    std = math.sqrt((0.1**2 + 0.15**2 + 0.65**2 + 2 * 0.35**2) / 4)
    assert whitened[0].tolist() == pytest.approx([-0.1 / std, 0.15 / std, 0.65 / std], abs=1e-5)
    losses = [actor.update(groups).report["metrics"]["losses/value"] for _ in range(2)]
    assert losses[0] == pytest.approx(0.5 * (0.25**2 + 0.5**2 + 1.0) / 5)
    assert losses[1] < losses[0]


def test_a_divergence_in_the_reward_comes_with_its_token() -> None:
    actor = learner("ppo", tiny(has_critic=True), lam=1.0, kl_coef=1.0, kl_in="reward", kl="k1")
    groups = scored([([5], [[7, 8]])])
    own, _ = actor._score(actor.policy, samples_of(groups))
    completion = groups[0].completions[0]
    completion.reward, completion.reference = 1.0, (own[0] - torch.tensor([0.25, 0.5])).tolist()
    batch, _ = actor._judge(groups)
    assert batch.advantage[0].tolist() == pytest.approx([1.0 - 0.25 - 0.5, 1.0 - 0.5], abs=1e-5)


def test_nothing_is_learned_until_flat_groups_have_been_replaced() -> None:
    actor = learner("dapo", tiny(), refill=1)
    flat, useful, other = scored(RAGGED)
    for completion in flat.completions:
        completion.rewards, completion.reward = {"accuracy": 1.0}, 1.0
    before = actor.policy.network.lm_head.weight.detach().clone()
    output = actor.update([flat, useful], False)
    assert output.items == [] and output.report == {"missing": 1}
    assert torch.equal(before, actor.policy.network.lm_head.weight)
    output = actor.update([other], False)
    assert output.report["missing"] == 0 and output.report["metrics"]["losses/samples"] == 5
    assert output.report["metrics"]["grpo/zero_std_fraction"] == pytest.approx(1 / 3)
    assert not torch.equal(before, actor.policy.network.lm_head.weight) and actor.waiting == []


@pytest.mark.parametrize(("accuracies", "reward", "kept"), [([1.0, 1.0], [0.7, 1.0], 0), ([0.0, 1.0], [0.5, 0.5], 2)])
def test_groups_are_left_out_by_accuracy_and_not_by_penalties(
    accuracies: list[float], reward: list[float], kept: int
) -> None:
    groups = scored([([5], [[7, 8], [9]])])
    for completion, right, paid in zip(groups[0].completions, accuracies, reward, strict=True):
        completion.rewards, completion.reward = {"accuracy": right}, paid
    metrics = learner("dapo", tiny()).update(groups).report["metrics"]
    assert metrics["losses/samples"] == kept
    assert metrics["grpo/zero_std_fraction"] == float(reward[0] == reward[1])


def test_minibatches_that_are_empty_are_no_steps() -> None:
    steps = []
    for minibatches in (2, 5):
        actor = learner("grpo", tiny(), minibatches=minibatches, weight_decay=0.1, lr=1e-2)
        metrics = actor.update(scored([([5], [[7, 8], [9]])])).report["metrics"]
        steps.append((metrics, actor.policy.network.lm_head.weight.detach().clone()))
    assert steps[0][0] == pytest.approx(steps[1][0]) and torch.equal(steps[0][1], steps[1][1])


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize(("apart", "version", "is_refused"), [(0.0, 0, False), (0.5, 0, True), (0.5, -1, False)])
def test_a_sampler_that_has_another_model_is_told_in_the_first_update(
    apart: float, version: int, is_refused: bool, elastic: bool
) -> None:
    actor = learner("grpo", tiny(), elastic=elastic)
    sampling = actor.config.sampling.model_copy(update={"ahead": 1})
    actor.has_learned, actor.config = False, actor.config.model_copy(update={"sampling": sampling})
    groups = of_the_model(scored(RAGGED), actor, apart)
    for group in groups:
        group.version = version
    if elastic:
        actor.accumulate(groups)
    if is_refused:
        with pytest.raises(RuntimeError, match=r"0.5 apart on average \(rounding explains 0.005\), 0.5 at most"):
            actor.update(groups)
        return
    metrics = actor.update(groups).report["metrics"]
    assert metrics["sampling/logprob_gap_mean"] == pytest.approx(apart, abs=1e-4)
    assert metrics["sampling/logprob_gap_max"] == pytest.approx(apart, abs=1e-4)
    actor.update(of_the_model(scored(RAGGED), actor, 1.0))  # later the two may differ


@pytest.mark.parametrize("apart", [0.05, 0.3])
def test_a_sampler_in_bfloat16_may_round_otherwise(apart: float) -> None:
    """The parameters that learn are float32, and computed with in bfloat16."""
    actor = learner("grpo", tiny())
    actor.has_learned, actor.policy.autocast = False, torch.bfloat16
    groups = of_the_model(scored(RAGGED), actor, apart)
    if apart < 0.1:
        assert actor.update(groups).report["metrics"]["sampling/logprob_gap_mean"] > 0.005
    else:
        with pytest.raises(RuntimeError, match="rounding explains 0.1"):
            actor.update(groups)


def test_samplers_are_given_no_critic() -> None:
    [weights] = learner("ppo", tiny(has_critic=True)).weights([])
    assert set(weights) == set(tiny().learned_state())


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of 8 experts with random weights, of the class that the recipe's model has."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    directory = tmp_path_factory.mktemp("mixture")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    shape = OlmoeConfig(vocab_size=50, num_experts=8, num_experts_per_tok=2, eos_token_id=1, pad_token_id=0, **sizes)
    OlmoeForCausalLM(shape).save_pretrained(directory)
    return str(directory)


def test_adapters_of_a_mixture_of_experts_learn_and_its_log_probs_are_those_of_separate_sequences(
    mixture: str, tmp_path: Path
) -> None:
    model = tiny(path=mixture, lora_rank=2)
    samples = [Sample(n, prompt, c) for n, (prompt, completions) in enumerate(RAGGED) for c in completions]
    for rows in cut(samples, 40, 128):
        scores = token_scores(model, samples, rows, 1.0)
        for place, number in enumerate(n for row in rows for n in row.numbers):
            prompt, completion = samples[number].prompt, samples[number].completion
            logits = model.network(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            assert torch.allclose(scores.logprob[place][scores.mask[place]], expected, atol=1e-4)
    actor = learner("gspo", model, lr=1e-2)
    weights = {name: value.clone() for name, value in model.learned_state().items()}
    assert weights and all("lora_" in name for name in weights)
    actor.update(scored(RAGGED))
    assert any(not torch.equal(value, weights[name]) for name, value in model.learned_state().items())
    sampler = LanguageModel(ModelConfig(path=mixture, lora_rank=2), trains=False, seed=0)
    sampler.load_learned_state(model.learned_state())
    [(_, completions)] = Generator(sampler.network, {1}, 4).generate([Request([5, 6], [1, 2])], Sampling(2, 1.0, 4))
    assert len(completions) == 2


def test_two_real_ranks_report_what_one_does_for_ragged_groups() -> None:
    one = learner("dapo", tiny(), drop_flat_groups=False, minibatches=1)
    groups = of_the_model(scored(RAGGED), one)
    one.config = one.config.model_copy(update={"model": ModelConfig(path="tiny")})
    alone = one.update(of_the_model(scored(RAGGED), one)).report["metrics"]
    with Cluster(cpu_slots=2) as cluster:
        place = parse_placement("actor: 0-1/1", 2, ["actor"])
        actor = cluster.start("actor", LanguageActor, place["actor"], one.config)
        flow = Flow("update")
        flow.stage(actor.update, flow.source("groups"), gather=True)
        done = Executor(flow, len(groups)).iterate({"groups": groups})
    assert len(done.reports["actor.update"]) == 2
    for report in done.reports["actor.update"]:
        assert report["metrics"] == pytest.approx(alone, abs=1e-5)
