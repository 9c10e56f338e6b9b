"""Keys and values of rows that are sampled together, in buffers that tokens are written into.

All rows end at the same column; what lies before a row's first token is padding. The last rows take the places of those
that leave; rows that enter are written behind the others. So little is copied, and all of it once in GROWTH tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

GROWTH = 64  # columns that are added when there are none left


class RowCache(Cache):
    """What a transformers model takes as its cache for one token of each row.

    Attributes:
        first: `[B]` the column of each row's first token.
        start: the first column of all rows.
        end: the column behind the last token.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(layers=[])
        self.layers: list[_Layer]  # type: ignore[assignment]
        self.first = torch.zeros(0, dtype=torch.long, device=device)
        self.start = self.end = 0

    def enter(self, prompts: Any, lengths: Tensor, prompt: Tensor) -> None:
        """Add rows that begin with a prompt.

        Args:
            prompts: the cache of the prompts, padded on the left.
            lengths: of the prompts, in tokens.
            prompt: the number of each row's prompt.
        """
        if not self.layers:
            self.layers = [_Layer(self, layer.keys, layer.values) for layer in prompts.layers]
        longest, count, used = prompts.get_seq_length(), len(self.first), self.end - self.start
        if count + len(prompt) > len(self.layers[0].keys) or longest > self.end:
            self._lay_out(count + len(prompt), max(used, longest))
        begin, rows = self.end - longest, slice(count, count + len(prompt))
        for layer, read in zip(self.layers, prompts.layers, strict=True):
            for buffer, values in ((layer.keys, read.keys), (layer.values, read.values)):
                buffer[rows, :, :begin] = 0.0  # padding, which must be finite
                buffer[rows, :, begin : self.end] = values[prompt]
        self.first = torch.cat([self.first, self.end - lengths[prompt]])
        self.start = int(self.first.min())

    def keep(self, kept: list[int]) -> list[int]:
        """Leave out all rows but these; returns which rows are now at the first places."""
        places = range(len(kept))
        holes = sorted(set(places) - set(kept))
        moved = [row for row in kept if row >= len(kept)]
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):
                buffer[holes, :, self.start : self.end] = buffer[moved, :, self.start : self.end]
        instead = dict(zip(holes, moved, strict=True))
        order = [instead.get(place, place) for place in places]
        self.first = self.first[order]
        self.start = int(self.first.min()) if order else self.end
        return order

    def next_token(self) -> tuple[Tensor, Tensor]:
        """Make room for a token of each row; mask of what it attends to `[B, 1, 1, T]`, and its position `[B, 1]`."""
        if self.end == self.layers[0].keys.shape[2]:
            self._lay_out(len(self.layers[0].keys), self.end - self.start)
        self.end += 1
        columns = torch.arange(self.start, self.end, device=self.first.device)
        return (columns >= self.first[:, None])[:, None, None], (self.end - 1 - self.first)[:, None]

    def _lay_out(self, places: int, width: int) -> None:
        """Move everything to new buffers, the end to column `width`."""
        count, used, shift = len(self.first), self.end - self.start, width - self.end
        for layer in self.layers:
            layer.keys, layer.values = (
                _moved(buffer[:count, :, self.start : self.end], places, width - used, width + GROWTH)
                for buffer in (layer.keys, layer.values)
            )
        self.first, self.start, self.end = self.first + shift, self.start + shift, width


def _moved(x: Tensor, places: int, column: int, columns: int) -> Tensor:
    buffer = x.new_empty(places, x.shape[1], columns, x.shape[3])
    buffer[:, :, :column] = 0.0
    buffer[: len(x), :, column : column + x.shape[2]] = x
    return buffer


class _Layer(DynamicLayer):
    """Keys and values of one layer, `[places, heads, columns, size]` each; those of a token are written in place."""

    keys: Tensor
    values: Tensor

    def __init__(self, rows: RowCache, keys: Tensor, values: Tensor) -> None:
        """Empty, for keys and values like these."""
        super().__init__()
        self.rows, self.is_initialized = rows, True
        self.keys, self.values = (x.new_empty(0, x.shape[1], 0, x.shape[3]) for x in (keys, values))

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        rows, count = self.rows, len(self.rows.first)
        self.keys[:count, :, rows.end - 1] = key_states[:, :, 0]
        self.values[:count, :, rows.end - 1] = value_states[:, :, 0]
        return self.keys[:count, :, rows.start : rows.end], self.values[:count, :, rows.start : rows.end]

    def get_seq_length(self) -> int:
        return self.rows.end - 1 - self.rows.start
