"""Frames to mp4 files that every browser plays (H.264, yuv420p, index at the front)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np


def write_mp4(path: Path, frames: np.ndarray | Iterable[np.ndarray], fps: float) -> Path:
    """Write RGB frames as an H.264 video; the file appears complete or not at all.

    Args:
        path: the mp4 file; its directory is created.
        frames: uint8 [T, H, W, 3], or an iterable of T frames [H, W, 3]. Odd sizes get their last row or
            column twice, as H.264 in yuv420p needs even ones.
        fps: frames per second of playback.

    Raises:
        ValueError: no frames, frames that are not uint8 [H, W, 3], or frames of different sizes.
    """
    import imageio_ffmpeg

    path = Path(path)
    iterator = iter(frames)
    first = next(iterator, None)
    if first is None:
        raise ValueError(f"no frames to write to {path}")
    shape = first.shape
    if len(shape) != 3 or shape[2] != 3 or 0 in shape:
        raise ValueError(f"a frame must be [H, W, 3], got {list(shape)}")
    _padded(first, shape, 0)
    height, width = shape[0] + shape[0] % 2, shape[1] + shape[1] % 2
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.partial.mp4")
    writer = imageio_ffmpeg.write_frames(
        str(temporary),
        (width, height),
        pix_fmt_in="rgb24",
        pix_fmt_out="yuv420p",
        fps=fps,
        codec="libx264",
        quality=None,
        macro_block_size=1,
        ffmpeg_log_level="error",
        output_params=["-crf", "20", "-preset", "veryfast", "-movflags", "+faststart"],
    )
    try:
        writer.send(None)
        for index, frame in enumerate(chain([first], iterator)):
            writer.send(_padded(frame, shape, index))
        writer.close()
        os.replace(temporary, path)
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)
    return path


def _padded(frame: np.ndarray, shape: tuple[int, ...], index: int) -> np.ndarray:
    if frame.shape != shape or frame.dtype != np.uint8:
        raise ValueError(f"frame {index} is {frame.dtype} {list(frame.shape)}, expected uint8 {list(shape)}")
    padded = np.pad(frame, ((0, shape[0] % 2), (0, shape[1] % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(padded)
