"""Videos decode to what was written, whatever the size of the frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embodied_rl.video import write_mp4


def moving_square(count: int, height: int, width: int) -> np.ndarray:
    frames = np.full((count, height, width, 3), 40, np.uint8)
    for index in range(count):
        frames[index, 8:24, 2 * index : 2 * index + 16] = (230, 60, 60)
    return frames


def decoded(path: Path) -> np.ndarray:
    import imageio.v3

    return np.asarray(imageio.v3.imread(path, plugin="FFMPEG"))


@pytest.mark.parametrize(("height", "width"), [(64, 96), (63, 95), (64, 95)])
def test_frames_come_back_in_number_size_and_content(tmp_path: Path, height: int, width: int) -> None:
    frames = moving_square(17, height, width)
    path = write_mp4(tmp_path / "deep" / "a.mp4", frames, fps=10)
    back = decoded(path)
    assert back.shape == (17, height + height % 2, width + width % 2, 3)
    error = np.abs(back[:, :height, :width].astype(int) - frames.astype(int)).mean(axis=(1, 2, 3))
    assert error.max() < 8
    assert [file.name for file in path.parent.iterdir()] == ["a.mp4"]


def test_an_iterable_of_frames_is_consumed_lazily(tmp_path: Path) -> None:
    path = write_mp4(tmp_path / "a.mp4", (frame for frame in moving_square(5, 32, 48)), fps=30)
    assert len(decoded(path)) == 5


def test_browsers_can_play_it_while_it_loads(tmp_path: Path) -> None:
    import imageio_ffmpeg

    path = write_mp4(tmp_path / "a.mp4", moving_square(5, 32, 48), fps=12)
    meta = next(imageio_ffmpeg.read_frames(str(path)))
    assert meta["codec"] == "h264" and meta["pix_fmt"].startswith("yuv420p") and meta["fps"] == 12
    content = path.read_bytes()
    assert 0 < content.index(b"moov") < content.index(b"mdat")


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (np.zeros((0, 8, 8, 3), np.uint8), "no frames"),
        (np.zeros((2, 8, 8), np.uint8), r"must be \[H, W, 3\], got \[8, 8\]"),
        (np.zeros((2, 8, 8, 3), np.float32), r"frame 0 is float32"),
        ([np.zeros((8, 8, 3), np.uint8), np.zeros((8, 10, 3), np.uint8)], r"frame 1 is uint8 \[8, 10, 3\]"),
    ],
)
def test_what_is_not_a_video_is_refused_and_leaves_no_file(tmp_path: Path, frames: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_mp4(tmp_path / "a.mp4", frames, fps=10)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
