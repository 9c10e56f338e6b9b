"""From observations to what the model reads: resized pixels and the ids of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from policies.base import Observation
from policies.openvla import images
from policies.openvla.config import ConfigError, OpenVLAConfig, read_json_object
from policies.openvla.prompts import PromptTokenizer

_MEAN_STD = {"siglip": ([0.5] * 3, [0.5] * 3), "dino": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])}


class Processor:
    """Prepares batches on the device where their images are.

    Args:
        config: of the model.
        tokenizer: of its prompts.
        written: content of the checkpoint's `preprocessor_config.json`; None: the published models' values.
        lanczos: resize images by TensorFlow's Lanczos filter first, as published evaluations in LIBERO do.
        center_crop: show the model the middle 90 % of each image, as evaluations of models do that were trained with
            random crops.
        view: which camera is shown.

    Attributes:
        reads: what observations must have.
        views: cameras that are read.
    """

    reads: tuple[str, ...] = ("image", "instruction")

    def __init__(
        self,
        config: OpenVLAConfig,
        tokenizer: PromptTokenizer,
        written: dict[str, Any] | None = None,
        lanczos: bool = False,
        center_crop: bool = False,
        view: int = 0,
    ) -> None:
        self.written = written or _published(config)
        self.tokenizer, self.lanczos, self.center_crop = tokenizer, lanczos, center_crop
        self.views: tuple[int, ...] = (view,)
        self.size: int = config.image_size
        self.strategy = self.written["image_resize_strategy"]
        if self.strategy not in get_args(images.ResizeStrategy):
            raise ValueError(f"unknown image_resize_strategy {self.strategy!r}")
        self.means, self.stds = self.written["means"], self.written["stds"]
        self.fill = [int(255 * mean) for mean in self.means[-1]]

    @staticmethod
    def read(directory: Path) -> dict[str, Any] | None:
        """The content of `preprocessor_config.json`, if the checkpoint has one.

        Raises:
            ConfigError: it is damaged, or lacks a part.
        """
        path = directory / "preprocessor_config.json"
        if not path.is_file():
            return None
        written = read_json_object(path)
        for key in ("means", "stds"):
            if not _are_colours(written.get(key)):
                raise ConfigError(
                    f"{path}: {key} is {written.get(key)!r}; expected three numbers for each vision tower"
                )
        if (strategy := written.get("image_resize_strategy")) not in get_args(images.ResizeStrategy):
            known = ", ".join(get_args(images.ResizeStrategy))
            raise ConfigError(f"{path}: image_resize_strategy is {strategy!r}; known: {known}")
        return written

    def __call__(self, observation: Observation) -> Observation:
        """Prepare `image` uint8 [N, V, H, W, 3] and `instruction`, N strings.

        Returns:
            `pixels` uint8 [N, 3, size, size] and `prompt` int64 [N, L] on the image's device. An observation that has
            them, or `features` of the pixels, is returned as it is, so they can be stored in place of what they were
            made from.

        Raises:
            KeyError: no image or no instruction.
            TypeError, ValueError: an image of another type or shape, or another number of instructions.
        """
        if "pixels" in observation or "features" in observation:
            return observation
        for key in self.reads:
            if key not in observation:
                raise KeyError(
                    f"OpenVLA reads `{key}`; the observation has {', '.join(sorted(observation)) or 'nothing'}"
                )
        image, instructions = torch.as_tensor(observation["image"]), observation["instruction"]
        if image.dtype != torch.uint8:
            raise TypeError(f"`image` is {image.dtype}; expected torch.uint8 with values from 0 to 255")
        if image.dim() != 5 or image.shape[-1] != 3 or image.shape[1] <= max(self.views):
            raise ValueError(
                f"`image` is {list(image.shape)}; expected [N, more than {max(self.views)} views, H, W, 3]"
            )
        if isinstance(instructions, str) or len(instructions) != len(image):
            given = "one string" if isinstance(instructions, str) else f"{len(instructions)} instructions"
            raise ValueError(f"{given} for {len(image)} images; expected a list of one string for each")
        return {
            "pixels": self.pixels(image),
            "prompt": self.tokenizer(instructions).to(image.device),
        }

    def pixels(self, image: Tensor) -> Tensor:
        """What is shown of images uint8 [N, V, H, W, 3]: uint8 [N, 3, size, size]."""
        return self.resize(image[:, self.views[0]].permute(0, 3, 1, 2))

    def resize(self, image: Tensor) -> Tensor:
        """Crop and resize uint8 [N, 3, H, W] -> [N, 3, size, size]."""
        if self.lanczos:
            image = images.lanczos(image)
        if self.center_crop:
            image = images.center_crop(image)
        return images.resize(image, self.size, self.strategy, self.fill)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [..., 3, size, size] -> what the vision towers see, float32 [..., 3 * towers, size, size]."""
        return images.normalise(pixels, self.means, self.stds)


def _are_colours(values: Any) -> bool:
    """Whether this is a list of one mean or deviation for each colour, for one or two towers."""
    colours = values if isinstance(values, list) else []
    return len(colours) in (1, 2) and all(
        isinstance(each, list) and len(each) == 3 and all(isinstance(x, int | float) for x in each) for each in colours
    )


def _published(config: OpenVLAConfig) -> dict[str, Any]:
    values = [_MEAN_STD["siglip" if "siglip" in name else "dino"] for name in config.timm_ids]
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": config.resize_strategy,
        "input_sizes": [[3, config.image_size, config.image_size]] * len(values),
        "interpolations": ["bicubic"] * len(values),
        "means": [mean for mean, _ in values],
        "stds": [std for _, std in values],
        "use_fused_vision_backbone": len(values) == 2,
    }
