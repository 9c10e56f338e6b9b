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
from torch.nn.functional import pad

from reasoning.samples import Completion, Sampling


@dataclass(frozen=True)
class Request:
    """A prompt's tokens and the seeds of its completions, one for each."""

    ids: list[int]
    seeds: list[int]


@dataclass
class _Row:
    """A completion in the making; `draws`: its random numbers [max_new_tokens]."""

    request: int
    place: int
    draws: Tensor
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
        batch: _Batch | None = None
        while waiting or batch:
            entering = []
            rows = len(batch.rows) if batch else 0
            while waiting and (rows == 0 or rows + len(waiting[0][1].seeds) <= self.max_rows):
                entering.append(waiting.popleft())
                rows += len(entering[-1][1].seeds)
            if entering:
                new = self._read(entering, sampling)
                batch = batch.joined_by(new) if batch else new
            assert batch is not None
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
            batch = self._extend(batch, tokens, kept)

    def _read(self, entering: list[tuple[int, Request]], sampling: Sampling) -> _Batch:
        """Read prompts, padded on the left, and make the rows of their completions."""
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
        rows = [
            _Row(number, place, _draws(seed, sampling.max_new_tokens))
            for number, request in entering
            for place, seed in enumerate(request.seeds)
        ]
        repeated = torch.arange(len(entering), device=device).repeat_interleave(counts)
        cache = output.cache
        cache.batch_select_indices(repeated)
        return _Batch(rows, cache, mask[repeated], output.logits[repeated, -1])

    def _extend(self, batch: _Batch, tokens: Tensor, kept: list[int]) -> _Batch | None:
        """Read one more token of each row that goes on."""
        if not kept:
            return None
        if len(kept) < len(batch.rows):
            batch.keep(kept)
            tokens = tokens[kept]
        batch.mask = pad(batch.mask, (0, 1), value=True)
        self.calls += 1
        output = self.network(
            input_ids=tokens[:, None],
            attention_mask=batch.mask.long(),
            position_ids=batch.mask.sum(1, keepdim=True) - 1,
            cache=batch.cache,
            use_cache=True,
        )
        batch.logits = output.logits[:, -1]
        return batch


@dataclass
class _Batch:
    """Rows that are sampled together. B rows, T columns of keys and values, V words.

    Attributes:
        cache: keys and values of each layer, `[B, heads, T, size]`.
        mask: `[B, T]` bool, False for padding, which is on the left.
        logits: `[B, V]` of each row's next token.
    """

    rows: list[_Row]
    cache: Any
    mask: Tensor
    logits: Tensor

    def draw(self, temperature: float) -> Tensor:
        """Draw each row's next token; tokens `[B]`."""
        logprobs = torch.log_softmax(self.logits.float() / (temperature or 1.0), -1)
        if temperature:
            cumulative = logprobs.exp().cumsum(-1)
            draws = torch.stack([row.draws[len(row.ids)] for row in self.rows]).to(cumulative.device)
            tokens = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)[:, 0]
            tokens = tokens.clamp_max(cumulative.shape[-1] - 1)
        else:
            tokens = logprobs.argmax(-1)
        drawn = zip(self.rows, tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist(), strict=True)
        for row, token, logprob in drawn:
            row.ids.append(token)
            row.logprobs.append(logprob)
        return tokens

    def keep(self, kept: list[int]) -> None:
        """Leave out all rows but these, and the columns that only the others needed."""
        self.rows = [self.rows[index] for index in kept]
        index = torch.tensor(kept, device=self.mask.device)
        self.mask = self.mask[index]
        first = int(self.mask.any(0).int().argmax())
        self.mask = self.mask[:, first:]
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[index, :, first:], layer.values[index, :, first:]

    def joined_by(self, other: _Batch) -> _Batch:
        """Both batches as one."""
        width = max(self.mask.shape[1], other.mask.shape[1])
        for batch in (self, other):
            more = width - batch.mask.shape[1]
            batch.mask = pad(batch.mask, (more, 0))
            for layer in batch.cache.layers:
                layer.keys, layer.values = pad(layer.keys, (0, 0, more, 0)), pad(layer.values, (0, 0, more, 0))
        for ours, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            ours.keys = torch.cat([ours.keys, theirs.keys])
            ours.values = torch.cat([ours.values, theirs.values])
        mask, logits = torch.cat([self.mask, other.mask]), torch.cat([self.logits, other.logits])
        return _Batch(self.rows + other.rows, self.cache, mask, logits)


def _draws(seed: int, count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))
