"""Resizing, cropping and normalising against Pillow, torchvision and TensorFlow."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import PIL
import pytest
import torch
from openvla_golden import DATA, golden_policy, tensors
from PIL import Image
from torch import Tensor

from policies.openvla import images

SIZES = ("224x224", "256x256", "480x640", "640x480", "128x96", "90x200")


def batch(image: Tensor) -> Tensor:
    return image.permute(2, 0, 1)[None]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("resolution", [56, 224])
@pytest.mark.parametrize("strategy", ["resize-naive", "letterbox", "resize-crop"])
def test_resized_and_normalised_images_equal_the_reference_bit_for_bit(
    strategy: images.ResizeStrategy, resolution: int, size: str
) -> None:
    name, data, processor = f"{strategy}_{resolution}_{size}", tensors("preprocess.npz"), golden_policy().processor
    resized = images.resize(batch(data[f"raw_{size}"]), resolution, strategy, processor.fill)
    assert torch.equal(resized[0], data[f"u8_{name}"])
    floats = processor.normalise(resized)[0]
    expected = json.loads((DATA / "preprocess.meta.json").read_text())["sha256_float32_bytes"]
    assert hashlib.sha256(floats.contiguous().numpy().tobytes()).hexdigest() == expected[name]


TALL = [(60, 30, 20), (200, 90, 56), (500, 40, 60), (58, 20, 56), (100, 80, 90), (97, 77, 56), (98, 77, 56)]
WIDE = [(30, 60, 20), (90, 200, 56), (40, 500, 60), (20, 58, 56), (80, 100, 90), (57, 56, 56), (9, 7, 56)]


@pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="older Pillows always start with the columns")
@pytest.mark.parametrize(("height", "width", "size"), TALL + WIDE)
def test_tall_and_wide_images_are_resized_as_pillow_does_it(height: int, width: int, size: int) -> None:
    image = np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))
    resized = images.resize(batch(torch.from_numpy(image)), size, "resize-naive", [0] * 3)
    assert np.array_equal(resized[0].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("size", ["224x224", "256x256", "480x640", "128x96"])
def test_the_centre_crop_equals_the_reference_bit_for_bit(size: str) -> None:
    expected = tensors("tf_image.npz")
    cropped = images.center_crop(batch(tensors("preprocess.npz")[f"raw_{size}"]))
    assert torch.equal(cropped[0].permute(1, 2, 0), expected[f"crop_{size}"])
    cropped = images.center_crop(batch(expected[f"jpeg_lanczos_{size}"]))
    assert torch.equal(cropped[0].permute(1, 2, 0), expected[f"jpeg_lanczos_crop_{size}"])


@pytest.mark.parametrize("size", ["224x224", "256x256", "480x640", "128x96"])
def test_lanczos_equals_the_reference_but_for_a_few_roundings(size: str) -> None:
    resized = images.lanczos(batch(tensors("preprocess.npz")[f"raw_{size}"]))[0].permute(1, 2, 0)
    distance = (resized.int() - tensors("tf_image.npz")[f"lanczos_{size}"].int()).abs()
    assert distance.max() <= 1
    assert (distance > 0).float().mean() <= 1e-4


@pytest.mark.parametrize("strategy", ["resize-naive", "letterbox", "resize-crop"])
def test_a_batch_is_its_images_one_by_one(strategy: images.ResizeStrategy) -> None:
    data = torch.randint(256, (3, 3, 40, 70), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    together = images.resize(data, 56, strategy, [127] * 3)
    alone = torch.cat([images.resize(image[None], 56, strategy, [127] * 3) for image in data])
    assert torch.equal(together, alone)
    assert torch.equal(images.lanczos(data), torch.cat([images.lanczos(image[None]) for image in data]))
    assert torch.equal(images.center_crop(data), torch.cat([images.center_crop(image[None]) for image in data]))
