"""Sampling of completions by transformers, in continuous batches.

A prompt is read once for all completions of its group, whose rows share the values that this gives. Rows leave the
batch when they end; prompts that wait take their place. The random numbers of a completion belong to it, not to the
batch: the j-th token is drawn by the j-th number, through the inverse of the cumulative distribution.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reasoning.cache import RowCache
from reasoning.samples import Completion, Sampling


@dataclass(frozen=True)
class Request:
    """A prompt's tokens and the seeds of its completions, one for each."""

    ids: list[int]
    seeds: list[int]


@dataclass
class _Row:
    """A completion in the making; `draws`: its random numbers, one for each token."""

    request: int
    place: int
    draws: list[float]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Generator:
    """Samples from a causal language model.

    Args:
        network: a transformers model whose layers keep all keys and values (no sliding windows).
        stop_ids: tokens of which the first ends a completion.
        max_rows: completions in the batch at once; a larger group is sampled alone.
    """

    def __init__(self, network: Any, stop_ids: set[int], max_rows: int) -> None:
        self.network, self.stop_ids, self.max_rows = network, stop_ids, max_rows
        self.calls = 0  # of the network

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        """(position of the request, its completions), as soon as all of a request have ended."""
        waiting = deque(enumerate(requests))
        open_rows = {number: len(request.seeds) for number, request in enumerate(requests)}
        done: dict[int, dict[int, Completion]] = {number: {} for number in open_rows}
        batch = _Batch([], RowCache(self.network.device), torch.zeros(0))
        while waiting or batch.rows:
            entering = []
            rows = len(batch.rows)
            while waiting and (rows == 0 or rows + len(waiting[0][1].seeds) <= self.max_rows):
                entering.append(waiting.popleft())
                rows += len(entering[-1][1].seeds)
            if entering:
                self._read(entering, sampling, batch)
            tokens = batch.draw(sampling.temperature)
            kept = []
            for index, row in enumerate(batch.rows):
                ended = row.ids[-1] in self.stop_ids
                if ended or len(row.ids) == sampling.max_new_tokens:
                    done[row.request][row.place] = Completion(row.ids, row.logprobs, ended)
                    if len(done[row.request]) == open_rows[row.request]:
                        finished = done.pop(row.request)
                        yield row.request, [finished[place] for place in range(len(finished))]
                else:
                    kept.append(index)
            self._extend(batch, tokens, kept)

    def _read(self, entering: list[tuple[int, Request]], sampling: Sampling, batch: _Batch) -> None:
        """Read prompts, padded on the left, and add the rows of their completions to the batch."""
        device = self.network.device
        longest = max(len(request.ids) for _, request in entering)
        ids = torch.tensor([[0] * (longest - len(r.ids)) + r.ids for _, r in entering], device=device)
        lengths = torch.tensor([len(request.ids) for _, request in entering], device=device)
        mask = torch.arange(longest, device=device) >= (longest - lengths)[:, None]
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        self.calls += 1
        output = self.network(
            input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=True, logits_to_keep=1
        )
        counts = torch.tensor([len(request.seeds) for _, request in entering], device=device)
        repeated = torch.arange(len(entering), device=device).repeat_interleave(counts)
        logits = output.logits[repeated, -1]
        batch.logits = torch.cat([batch.logits, logits]) if batch.rows else logits
        batch.cache.enter(output.cache, lengths, repeated)
        batch.rows += [
            _Row(number, place, _draws(seed, sampling.max_new_tokens))
            for number, request in entering
            for place, seed in enumerate(request.seeds)
        ]

    def _extend(self, batch: _Batch, tokens: Tensor, kept: list[int]) -> None:
        """Read one more token of each row that goes on."""
        if len(kept) < len(batch.rows):
            order = batch.cache.keep(kept)
            batch.rows = [batch.rows[index] for index in order]
            tokens = tokens[order]
        if not kept:
            return
        mask, positions = batch.cache.next_token()
        self.calls += 1
        output = self.network(
            input_ids=tokens[:, None], attention_mask=mask, position_ids=positions, cache=batch.cache, use_cache=True
        )
        batch.logits = output.logits[:, -1]


@dataclass
class _Batch:
    """Rows that are sampled together; `logits` `[B, V]` of the next token of each."""

    rows: list[_Row]
    cache: RowCache
    logits: Tensor

    def draw(self, temperature: float) -> Tensor:
        """Draw each row's next token; tokens `[B]`."""
        logprobs = torch.log_softmax(self.logits.float() / (temperature or 1.0), -1)
        if temperature:
            cumulative = logprobs.exp().cumsum(-1)
            draws = torch.tensor([row.draws[len(row.ids)] for row in self.rows], device=cumulative.device)
            tokens = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)[:, 0]
            tokens = tokens.clamp_max(cumulative.shape[-1] - 1)
        else:
            tokens = logprobs.argmax(-1)
        drawn = zip(self.rows, tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist(), strict=True)
        for row, token, logprob in drawn:
            row.ids.append(token)
            row.logprobs.append(logprob)
        return tokens


def _draws(seed: int, count: int) -> list[float]:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()
