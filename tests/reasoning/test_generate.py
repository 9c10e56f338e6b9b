"""Continuous batching gives what sampling one completion at a time would."""

from __future__ import annotations

import pytest
import torch

from reasoning.config import ModelConfig
from reasoning.generate import Generator, Request
from reasoning.models import LanguageModel
from reasoning.samples import Completion, Sampling

CONFIG = ModelConfig(path="tiny")
PROMPTS = [[5, 6, 7], [9], [4, 4, 4, 4, 4, 4, 4], [20, 21], [8, 9, 10, 11]]
REQUESTS = [Request(ids, [100 * number + place for place in range(3)]) for number, ids in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    model = LanguageModel(CONFIG, trains=False, seed=0)
    with torch.no_grad():  # so that some completions end early
        model.network.lm_head.weight[1] *= 4.0
    return model


def sampled(generator: Generator, requests: list[Request], sampling: Sampling) -> list[list[Completion]]:
    found = dict(generator.generate(requests, sampling))
    return [found[number] for number in range(len(requests))]


@pytest.mark.parametrize("max_rows", [1, 3, 6, 100])
def test_the_batch_does_not_change_what_is_sampled(model: LanguageModel, max_rows: int) -> None:
    sampling = Sampling(3, 1.0, 12)
    together = sampled(Generator(model.network, model.stop_ids, max_rows), REQUESTS, sampling)
    for request, group in zip(REQUESTS, together, strict=True):
        for seed, completion in zip(request.seeds, group, strict=True):
            [[alone]] = sampled(Generator(model.network, model.stop_ids, 1), [Request(request.ids, [seed])], sampling)
            assert completion.ids == alone.ids and completion.finished == alone.finished
            assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_sampling_temperature(model: LanguageModel, temperature: float) -> None:
    found = sampled(Generator(model.network, model.stop_ids, 100), REQUESTS, Sampling(3, temperature, 12))
    for request, group in zip(REQUESTS, found, strict=True):
        for completion in group:
            ids = torch.tensor([request.ids + completion.ids])
            with torch.no_grad():
                logits = model.network(input_ids=ids).logits[0, len(request.ids) - 1 : -1]
            expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(completion.ids)[:, None])
            assert completion.logprobs == pytest.approx(expected[:, 0].tolist(), abs=1e-4)


def test_the_likeliest_tokens_are_those_of_transformers(model: LanguageModel) -> None:
    found = sampled(Generator(model.network, model.stop_ids, 2), REQUESTS, Sampling(3, 0.0, 8))
    for request, group in zip(REQUESTS, found, strict=True):
        expected = model.network.generate(
            torch.tensor([request.ids]), do_sample=False, max_new_tokens=8, eos_token_id=list(model.stop_ids)
        )
        assert group[0].ids == group[2].ids == expected[0, len(request.ids) :].tolist()


def test_the_first_of_several_stop_tokens_ends_a_completion(model: LanguageModel) -> None:
    stops = {1, 5, 17}
    for group in sampled(Generator(model.network, stops, 4), REQUESTS, Sampling(3, 1.0, 12)):
        for completion in group:
            assert not stops & set(completion.ids[:-1])
            assert completion.finished == (completion.ids[-1] in stops)
            assert completion.finished or len(completion.ids) == 12


def test_rows_that_end_make_room_and_groups_come_as_they_end(model: LanguageModel) -> None:
    requests = [Request([5, 6], [number]) for number in range(12)]
    generator = Generator(model.network, model.stop_ids, 4)
    order = [number for number, _ in generator.generate(requests, Sampling(1, 1.0, 12))]
    assert sorted(order) == list(range(12)) and order != list(range(12))
    assert generator.calls < 3 * 12  # three batches of four, had each waited for its longest row


def test_token_frequencies_follow_the_distribution(model: LanguageModel) -> None:
    generator = Generator(model.network, set(), 4000)
    [completions] = sampled(generator, [Request([5, 6], list(range(4000)))], Sampling(4000, 1.0, 1))
    with torch.no_grad():
        expected = torch.softmax(model.network(input_ids=torch.tensor([[5, 6]])).logits[0, -1], -1)
    counts = torch.bincount(torch.tensor([c.ids[0] for c in completions]), minlength=len(expected)) / 4000
    assert float((counts - expected).abs().sum()) < 0.12
