"""Named protocols of published LIBERO evaluations: how an episode starts and ends, and what the policy is shown.

Figures of different protocols are not comparable, so the whole protocol is part of a result's fingerprint.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from envs.libero import SETTLE
from envs.libero_suites import HORIZONS


@dataclass(frozen=True)
class Protocol:
    """How a policy is evaluated.

    Attributes:
        settle_action, settle_steps: executed before an episode begins; not counted.
        horizons: env steps after which an episode of a suite is a failure.
        jpeg: images are encoded and decoded once, as training data was.
        lanczos: images are resized to 224 pixels by TensorFlow's filter; else the policy's own resizing is all.
        center_crop: the policy sees the middle 90 % of the image, for models that were trained with random crops.
        trials: episodes of each task; trial t begins at the task's stored init state t.
        temperature: of sampling; None: greedy.
        chunk: actions executed from one policy call, where the policy gives as many.
        epsilon: added to the range of an action dimension when actions are brought to the data set's units.
        views: cameras that a model of OpenVLA-OFT sees.
        layout: of the sequence that it was trained with.
        at_once: a checkpoint that says nothing of itself is of OpenVLA-OFT, and not of OpenVLA.
    """

    name: str
    settle_action: tuple[float, ...] = SETTLE
    settle_steps: int = 10
    horizons: dict[str, int] = field(default_factory=lambda: dict(HORIZONS))
    jpeg: bool = True
    lanczos: bool = True
    center_crop: bool = True
    trials: int = 50
    temperature: float | None = None
    chunk: int = 8
    epsilon: float = 1e-8
    views: tuple[int, ...] = (0, 1)
    layout: Literal["official", "simplevla", "rlinf"] = "official"
    at_once: bool = False

    def see(self, images: np.ndarray) -> np.ndarray:
        """What the policy is shown of the env's images: uint8 [N, V, H, W, 3] -> [N, V, H', W', 3]."""
        if self.jpeg:
            flat = images.reshape(-1, *images.shape[2:])
            images = np.stack([jpeg_round_trip(image) for image in flat]).reshape(images.shape)
        if not (self.lanczos or self.center_crop):
            return images
        import torch

        from policies.openvla.images import center_crop, lanczos

        tensor = torch.from_numpy(images.reshape(-1, *images.shape[2:])).permute(0, 3, 1, 2)
        tensor = lanczos(tensor) if self.lanczos else tensor
        tensor = center_crop(tensor) if self.center_crop else tensor
        shown = tensor.permute(0, 2, 3, 1).numpy()
        return shown.reshape(*images.shape[:2], *shown.shape[1:])


_OFT = Protocol("openvla-oft")
_LONG = dict.fromkeys(HORIZONS, 512)
PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        _OFT,
        replace(_OFT, name="openvla", chunk=1, epsilon=0.0),
        replace(_OFT, name="simplevla", horizons=_LONG, views=(0,), layout="simplevla", at_once=True),
        # Its recipes cap episodes at 240 to 520 steps; this is the evaluation of all of them at 512.
        Protocol(
            "rlinf",
            settle_steps=15,
            horizons=_LONG,
            jpeg=False,
            lanczos=False,
            center_crop=False,
            temperature=1.6,
            views=(0,),
            layout="rlinf",
            at_once=True,
        ),
        Protocol(
            "lerobot",
            horizons={**HORIZONS, "libero_spatial": 280},
            jpeg=False,
            lanczos=False,
            center_crop=False,
            trials=10,
            epsilon=0.0,
        ),
    )
}


def jpeg_round_trip(image: np.ndarray) -> np.ndarray:
    """An image uint8 [H, W, 3] after encoding as JPEG, quality 95 and 4:2:0, and decoding with the accurate DCT.

    TensorFlow encodes the same; its decoder's fast DCT differs by up to 16 levels.
    """
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=95, subsampling=2)
    return np.asarray(Image.open(buffer))
