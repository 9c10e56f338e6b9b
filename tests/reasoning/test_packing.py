"""Rows that share a prompt give the log-probs, losses and gradients of separate sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learners import learner, scored
from torch import Tensor

from embodied_rl.sums import Sums
from reasoning.actor import LanguageActor
from reasoning.batch import samples_of
from reasoning.config import ModelConfig
from reasoning.models import LanguageModel
from reasoning.packing import Row, Sample, cut, token_scores
from reasoning.samples import Group

TOKENS = st.integers(3, 40)
SAMPLES = st.lists(
    st.tuples(
        st.lists(TOKENS, min_size=1, max_size=6),
        st.lists(st.lists(TOKENS, min_size=1, max_size=9), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=4,
)
torch.set_num_threads(1)
ALGORITHMS = ["grpo", "dr_grpo", "dapo", "rloo", "reinforce", "gspo", "cispo"]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(ModelConfig(path="tiny"), trains=True, seed=0)


def flat(groups: list[tuple[list[int], list[list[int]]]]) -> list[Sample]:
    return [Sample(n, prompt, c) for n, (prompt, completions) in enumerate(groups) for c in completions]


@given(SAMPLES, st.integers(1, 60), st.integers(1, 200))
@settings(max_examples=25, deadline=None)
def test_cutting_loses_no_sample_and_keeps_to_the_budget(groups: list, budget: int, hidden: int) -> None:
    samples = flat(groups)
    batches = cut(samples, budget, hidden)
    assert sorted(n for rows in batches for row in rows for n in row.numbers) == list(range(len(samples)))
    for rows in batches:
        is_one_sequence = [len(row.numbers) for row in rows] == [1]
        assert is_one_sequence or max(row.length for row in rows) * len(rows) <= budget


@pytest.mark.parametrize(("prompt", "completion", "budget"), [(1000, 401, 1500), (200, 513, 1024)])
def test_a_row_ends_where_the_next_completion_would_exceed_the_budget(
    prompt: int, completion: int, budget: int
) -> None:
    batches = cut(flat([([5] * prompt, [[7] * completion] * 6)]), budget, 576)
    assert batches == [[Row([number], prompt + completion - 1)] for number in range(6)]


def test_rows_of_unlike_length_are_not_padded_to_one() -> None:
    samples = flat([([5, 6], [[7] * 9]), ([5, 6], [[7] * 9]), ([5, 6], [[7] * 41])])
    assert cut(samples, 160, 1) == [[Row([0], 10), Row([1], 10)], [Row([2], 42)]]


def test_completions_share_a_row_while_their_prompt_is_what_costs_most() -> None:
    """sqrt(8 (6 x 4 + 8)) = 16 tokens beside the prompt; a completion's last token takes no part."""
    samples = flat([([5] * 8, [[7] * 9] * 5)])
    assert cut(samples, 100, 4) == [[Row([4], 16), Row([0, 1], 24), Row([2, 3], 24)]]


@given(SAMPLES, st.integers(1, 60), st.integers(1, 200), st.sampled_from([1.0, 0.7]))
@settings(max_examples=15, deadline=None)
def test_log_probs_are_those_of_separate_sequences(
    model: LanguageModel, groups: list, budget: int, hidden: int, temperature: float
) -> None:
    samples = flat(groups)
    for rows in cut(samples, budget, hidden):
        scores = token_scores(model, samples, rows, temperature)
        logprob, entropy, mask = scores.logprob, scores.entropy, scores.mask
        for place, number in enumerate(n for row in rows for n in row.numbers):
            prompt, completion = samples[number].prompt, samples[number].completion
            logits = model.network(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits / temperature, -1)
            chosen = expected.gather(1, torch.tensor(completion)[:, None])[:, 0]
            assert torch.equal(mask[place], torch.arange(mask.shape[1]) < len(completion))
            assert torch.allclose(logprob[place][mask[place]], chosen, atol=1e-4)
            assert torch.allclose(entropy[place][mask[place]], -(expected.exp() * expected).sum(-1), atol=1e-4)
            assert not logprob[place][~mask[place]].any()


def gradients(actor: LanguageActor, shares: list[list[Group]]) -> tuple[float, list[Tensor]]:
    """The loss and its gradients, the groups cut into shares as ranks would have them."""
    model = actor.policy
    model.zero_grad()
    everything = actor._learnable([group for share in shares for group in share], Sums())
    totals, loss = actor._denominators(everything), 0.0
    first = 0
    for share in shares:
        count = sum(1 for _ in samples_of(share))
        part = everything.rows(list(range(first, first + count)))
        first += count
        for rows in actor._cut(part.samples):
            each = actor._share_of_loss(part, totals, Sums(), rows)
            each.backward()
            loss += float(each.detach())
    return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ALGORITHMS)
@given(SAMPLES, st.integers(1, 60), st.integers(1, 3))
@settings(max_examples=4, deadline=None)
def test_micro_batches_and_ranks_change_neither_loss_nor_gradients(
    model: LanguageModel, name: str, groups: list, budget: int, ranks: int
) -> None:
    data = scored(groups)
    options: dict = {"drop_flat_groups": False, "minibatches": 2}  # old log-probs are computed beforehand
    whole, expected = gradients(learner(name, model, token_budget=10_000, **options), [data])
    shares = [data[rank::ranks] for rank in range(ranks)]
    data_by_rank = [share for share in shares if share]
    cut_loss, found = gradients(learner(name, model, token_budget=budget, **options), data_by_rank)
    assert cut_loss == pytest.approx(whole, abs=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_group_sizes_may_differ_and_undecided_completions_take_no_part(model: LanguageModel) -> None:
    groups = scored([([5, 6], [[7], [8, 9], [4]]), ([9], [[3, 3], [4]])])
    groups[0].completions[2].reward = None
    batch = learner("dr_grpo", model)._learnable(groups, Sums())
    assert [sample.completion for sample in batch.samples] == [[7], [8, 9], [3, 3], [4]]
    assert float(batch.advantage[:2].sum()) == pytest.approx(0.0, abs=1e-6)
    assert float(batch.advantage[2:].sum()) == pytest.approx(0.0, abs=1e-6)


def test_dynamic_sampling_leaves_flat_groups_out_of_the_forward_pass(model: LanguageModel) -> None:
    groups = scored([([5, 6], [[7], [8, 9]]), ([9], [[3, 3], [4]])])
    for completion in groups[0].completions:
        completion.rewards, completion.reward = {"accuracy": 1.0}, 1.0
    batch = learner("dapo", model)._learnable(groups, Sums())
    assert [sample.prompt for sample in batch.samples] == [[9], [9]]


def test_grpo_advantages_of_a_hand_worked_group(model: LanguageModel) -> None:
    groups = scored([([5], [[7], [8], [9], [10]])])
    for completion, reward in zip(groups[0].completions, [1.0, 0.0, 0.0, 0.0], strict=True):
        completion.reward = reward
    batch = learner("grpo", model)._learnable(groups, Sums())
    assert batch.advantage.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_the_divergence_in_the_reward_lowers_what_strays_from_the_reference(model: LanguageModel) -> None:
    groups = scored([([5], [[7], [8]])])
    actor = learner("dr_grpo", model, kl_coef=1.0, kl_in="reward", kl="k1")
    own, _ = actor._score(model, samples_of(groups))
    for completion, logprob, apart in zip(groups[0].completions, own, [0.5, 0.0], strict=True):
        completion.reward, completion.reference = 1.0, (logprob - apart).tolist()
    batch = actor._learnable(groups, Sums())
    assert batch.advantage.tolist() == pytest.approx([-0.25, 0.25], abs=1e-5)
