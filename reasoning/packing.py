"""Completions in rows for training: the prompt once, followed by several of its completions that do not see each other.

    prompt | completion 1 | completion 2 | ...

Each token attends to the prompt and to its own completion, at the positions that it would have alone. So a group costs
its prompt once, and log-probs and gradients are those of separate sequences. The last token of a completion predicts
nothing and is left out. The head of the network, which is large, only sees the positions that predict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reasoning.models import LanguageModel

PADDING = 1 / 8  # of the budget of tokens, at most


@dataclass(frozen=True)
class Sample:
    """A prompt and one completion; equal `group`: equal prompts."""

    group: int
    prompt: list[int]
    completion: list[int]


@dataclass(frozen=True)
class Row:
    """The sequences (by number) that share a row, and its length in tokens."""

    numbers: list[int]
    length: int


def cut(sequences: Sequence[Sample], budget: int, hidden: int) -> list[list[Row]]:
    """Micro-batches of rows of like length, each of at most `budget` padded tokens (or of one sequence).

    Args:
        hidden: width of the network, which decides how much attention costs beside all else.
    """
    batches: list[list[Row]] = []
    tokens = 0  # of the last batch
    for row in sorted(_rows(sequences, budget, hidden), key=lambda row: row.length):
        padded = row.length * (len(batches[-1]) + 1) if batches else 0
        if not batches or padded > budget or padded - tokens - row.length > PADDING * budget:
            batches.append([])
            tokens = 0
        batches[-1].append(row)
        tokens += row.length
    return batches


def _rows(sequences: Sequence[Sample], budget: int, hidden: int) -> Iterator[Row]:
    """Completions share a row while it keeps to the budget and saves more by their prompt than attention costs.

    A row of T tokens costs T (1 + T / 6 hidden): the weights of a layer have 12 hidden^2 elements, and attention over T
    costs as much as 2 T hidden more. By completion that is least where T - prompt = sqrt(prompt (6 hidden + prompt)).
    """
    by_group: dict[int, list[int]] = {}
    for number, sequence in enumerate(sequences):
        by_group.setdefault(sequence.group, []).append(number)
    for numbers in by_group.values():
        prompt = len(sequences[numbers[0]].prompt)
        room = math.sqrt(prompt * (6 * hidden + prompt))
        row, length = list[int](), 0
        for number in numbers:
            more = len(sequences[number].completion) - 1
            if row and prompt + length + more > budget:
                yield Row(row, prompt + length)
                row, length = [], 0
            row.append(number)
            length += more
            if length >= room:
                yield Row(row, prompt + length)
                row, length = [], 0
        if row:
            yield Row(row, prompt + length)


@dataclass(frozen=True)
class Scores:
    """What a model makes of completions, each `[S, L]`: S sequences in the order of the rows, L the longest completion.

    Attributes:
        mask: bool; all others are float32, 0 where it is False.
        value: what the critic expects before each token; None without one.
    """

    logprob: Tensor
    entropy: Tensor
    mask: Tensor
    value: Tensor | None


def token_scores(model: LanguageModel, sequences: Sequence[Sample], rows: Sequence[Row], temperature: float) -> Scores:
    """Log-probs and entropies of the completions' tokens at a temperature, and values, differentiable."""
    network, device = model.network, next(model.parameters()).device
    width = max(row.length for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions, segments = torch.zeros_like(ids), torch.full_like(ids, -1)
    at: list[tuple[int, int, int, int, int]] = []  # sequence, token, row, the position that predicts it, id
    count = 0
    for place, row in enumerate(rows):
        prompt = sequences[row.numbers[0]].prompt
        end = len(prompt)
        ids[place, :end], positions[place, :end], segments[place, :end] = torch.tensor(prompt), torch.arange(end), 0
        for segment, number in enumerate(row.numbers, start=1):
            completion = sequences[number].completion
            span = slice(end, end + len(completion) - 1)
            ids[place, span], segments[place, span] = torch.tensor(completion[:-1]), segment
            positions[place, span] = torch.arange(len(prompt), len(prompt) + len(completion) - 1)
            predictors = [len(prompt) - 1, *range(end, span.stop)]
            at += [(count, token, place, where, completion[token]) for token, where in enumerate(predictors)]
            end = span.stop
            count += 1
    table = torch.tensor(at, device=device)
    seen = _visible(segments).to(device)
    mixed = torch.autocast(device.type, model.autocast) if model.autocast else nullcontext()
    with mixed:
        hidden = _body(network)(
            input_ids=ids.to(device), attention_mask=seen, position_ids=positions.to(device), use_cache=False
        ).last_hidden_state
        predicting = hidden[table[:, 2], table[:, 3]]
        logits = network.get_output_embeddings()(predicting)
    distribution = torch.log_softmax(logits.float() / temperature, -1)
    found = distribution.gather(1, table[:, 4:5])[:, 0]
    spread = -(distribution.detach().exp() * distribution.detach()).sum(-1)
    where, shape = (table[:, 0], table[:, 1]), (count, int(table[:, 1].max()) + 1)

    def laid_out(x: Tensor) -> Tensor:
        return torch.zeros(shape, dtype=x.dtype, device=device).index_put(where, x)

    value = None if model.critic is None else laid_out(model.critic(predicting.float())[:, 0])
    mask = laid_out(torch.ones_like(found, dtype=torch.bool))
    return Scores(laid_out(found), laid_out(spread), mask, value)


def _visible(segments: Tensor) -> Tensor:
    """Which tokens a token attends to, bool [R, 1, T, T]: earlier ones of its prompt and of its own completion."""
    query, key = segments[:, :, None], segments[:, None, :]
    width = segments.shape[1]
    earlier = torch.ones(width, width, dtype=torch.bool).tril()
    itself = torch.eye(width, dtype=torch.bool)  # padding must attend to something
    return ((((key == 0) | (key == query)) & (query >= 0) & earlier) | itself)[:, None]


def _body(network: Any) -> Any:
    """The network without its head."""
    base = getattr(network, "get_base_model", lambda: network)()
    return base.model
