"""Batches of uint8 images, resized and cropped on their own device exactly as the reference does it on the CPU.

A model's own resizing is the bicubic of Pillow 13: fixed-point weights, first the columns, or first the rows where far
more of these are lost, rounded to 8 bits in between. Older Pillows always start with the columns, which makes some
pixels of tall images differ. What evaluations do before it is TensorFlow's: antialiased Lanczos, and a centre crop by
`crop_and_resize`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

ResizeStrategy = Literal["resize-naive", "letterbox", "resize-crop"]

EVALUATION_SIZE = 224
"""Height and width of what `lanczos` and `center_crop` return, whatever the model's image size is."""

_PRECISION = 22  # bits after the point of Pillow's weights


def resize(images: Tensor, size: int, strategy: ResizeStrategy, fill: Sequence[int]) -> Tensor:
    """Images uint8 [N, 3, H, W] -> [N, 3, size, size].

    `resize-naive` ignores the aspect, `letterbox` pads to a square of colour `fill` first, `resize-crop` fits the
    short side and cuts the centre out.
    """
    height, width = images.shape[-2:]
    if strategy == "letterbox":
        side = max(height, width)
        rows, columns = (side - height) // 2, (side - width) // 2
        padded = torch.tensor(fill, dtype=torch.uint8, device=images.device)[None, :, None, None]
        padded = padded.repeat(len(images), 1, height + 2 * rows, width + 2 * columns)
        padded[..., rows : rows + height, columns : columns + width] = images
        return _bicubic(padded, size, size)
    if strategy == "resize-crop":
        short = min(height, width)
        images = _bicubic(images, int(size * height / short), int(size * width / short))
        top, left = (round((side - size) / 2) for side in images.shape[-2:])
        return images[..., top : top + size, left : left + size]
    return _bicubic(images, size, size)


def center_crop(images: Tensor, area: float = 0.9) -> Tensor:
    """The middle of images uint8 [N, 3, H, W], of a given share of their area, as [N, 3, 224, 224].

    What a policy sees that was trained with random crops of this area. Bilinear, end to end, without antialias.
    """
    side = np.sqrt(np.float32(area))
    low = (1 - side) / np.float32(2)
    pixels = images.float() * float(np.float32(1 / 255))
    for dim in (-1, -2):  # float32 all the way, since the last bit decides some pixels
        span = np.float32(images.shape[dim] - 1)
        step = np.float32((low + side - low) * span / np.float32(EVALUATION_SIZE - 1))
        at = torch.from_numpy(low * span + np.arange(EVALUATION_SIZE, dtype=np.float32) * step).to(images.device)
        first, last = (pixels.index_select(dim, index.long()) for index in (at.floor(), at.ceil()))
        fraction = at - at.floor()
        pixels = first + (last - first) * (fraction[:, None] if dim == -2 else fraction)
    return (pixels.clamp(0, 1) * 255.5).to(torch.uint8)


def lanczos(images: Tensor) -> Tensor:
    """Images uint8 [N, 3, H, W] -> [N, 3, 224, 224]; TensorFlow's `resize` with `lanczos3` and antialias.

    Rounding may differ by one level in a few of 100,000 pixels.
    """
    pixels = images.double()
    for dim in (-2, -1):
        weights = _weights(images.shape[dim], EVALUATION_SIZE, _lanczos3, 3.0).to(images.device)
        pixels = (pixels.movedim(dim, -1) @ weights.T).movedim(-1, dim)
    return pixels.round().clamp(0, 255).to(torch.uint8)


def normalise(images: Tensor, means: Sequence[Sequence[float]], stds: Sequence[Sequence[float]]) -> Tensor:
    """Images uint8 [..., 3, H, W] -> float32 [..., 3 * towers, H, W], with a mean and a deviation for each tower."""
    scaled = images.float() / 255
    column = lambda values: torch.tensor(values, device=images.device)[:, None, None]  # noqa: E731
    return torch.cat([(scaled - column(mean)) / column(std) for mean, std in zip(means, stds, strict=True)], dim=-3)


def _bicubic(images: Tensor, height: int, width: int) -> Tensor:
    """As Pillow 13, whose order of the two directions is from its pull request 9549."""
    order = [(-1, width), (-2, height)]
    if images.shape[-2] - height > max(0, 2 * (images.shape[-1] - width)):
        order.reverse()
    for dim, size in order:
        if images.shape[dim] != size:
            # Products of 8 and 22 bits: their sums are exact in float64.
            weights = _weights(images.shape[dim], size, _cubic, 2.0) * 2**_PRECISION
            weights = torch.trunc(weights + weights.sign() / 2).to(images.device)
            sums = images.double().movedim(dim, -1) @ weights.T
            rounded = torch.floor((sums + 2 ** (_PRECISION - 1)) / 2**_PRECISION)
            images = rounded.clamp(0, 255).to(torch.uint8).movedim(-1, dim)
    return images


@functools.lru_cache
def _weights(old: int, new: int, kernel: Callable[[np.ndarray], np.ndarray], radius: float) -> Tensor:
    """How much each old pixel counts in each new one, float64 [new, old]; a kernel is widened when an image shrinks."""
    scale = old / new
    spread = max(scale, 1.0)
    weights = np.zeros((new, old))
    for row in range(new):
        centre = (row + 0.5) * scale
        first, last = max(int(centre - radius * spread + 0.5), 0), min(int(centre + radius * spread + 0.5), old)
        taps = kernel(np.abs((np.arange(first, last) - centre + 0.5) / spread))
        weights[row, first:last] = taps / taps.sum()
    return torch.from_numpy(weights)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -0.5."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos3(x: np.ndarray) -> np.ndarray:
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0.0)
