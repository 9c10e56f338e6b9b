"""What env servers and their clients say to each other: a msgpack header, and large arrays as raw frames beside it.

Nothing on the wire is pickled, and nothing received is trusted: sizes, counts, types and shapes are checked.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import zmq
import zmq.utils.z85

from envs.base import ActionSpec, EnvSettings, EnvSpec, Task

PROTOCOL = 2
MAX_FRAME = 2**30  # bytes of one frame that a client takes: the pictures of a chunk step
MAX_REQUEST = 2**24  # bytes of one frame that a server takes: actions, or states to restore
MAX_FRAMES = 64
MAX_LIST = 2**16  # items; a server that gets more takes it for no message, and answers nothing
INLINE = 2**16  # bytes up to which an array travels in the header
DTYPES = ("|b1", "|u1", "<i8", "<f4", "<f8")
MIN_TOKEN = 16  # bytes
_IN_HEADER, _IN_FRAME = 1, 2  # msgpack extension types


class WireError(ValueError):
    """A message that is not one of this protocol."""


def pack(message: dict[str, Any]) -> list[Any]:
    """The frames of a message; arrays beyond `INLINE` are not copied, as long as there are frames for them."""
    frames: list[Any] = [b""]

    def extend(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray) or value.dtype.str not in DTYPES:
            what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
            raise TypeError(f"{what} does not go over the wire")
        array = np.ascontiguousarray(value)
        about = (array.dtype.str, array.shape)
        if array.nbytes <= INLINE or len(frames) == MAX_FRAMES:
            return msgpack.ExtType(_IN_HEADER, msgpack.packb((*about, array.tobytes())))
        frames.append(memoryview(array).cast("B"))  # type: ignore[arg-type]
        return msgpack.ExtType(_IN_FRAME, msgpack.packb((*about, len(frames) - 1)))

    frames[0] = msgpack.packb(message, default=extend)
    return frames


def largest(frames: Sequence[Any]) -> int:
    """Bytes of the largest frame: of one that is too large libzmq tells nobody, and ends the connection."""
    return max(memoryview(frame).nbytes for frame in frames)


def unpack(frames: Sequence[Any]) -> dict[str, Any]:
    """The message in frames (bytes or buffers); its large arrays are views of them. Raises WireError."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"{len(frames)} frames")

    def extension(code: int, data: bytes) -> np.ndarray:
        dtype, shape, content = msgpack.unpackb(data, max_array_len=16)
        if code == _IN_FRAME:
            content = frames[content] if isinstance(content, int) and 1 <= content < len(frames) else None
        if dtype not in DTYPES or not isinstance(shape, list) or content is None:
            raise WireError(f"an array {dtype} {shape}")
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise WireError(f"an array of shape {shape}")
        if math.prod(shape) * np.dtype(dtype).itemsize != memoryview(content).nbytes:
            raise WireError(f"an array of shape {shape} in {memoryview(content).nbytes} bytes")
        return np.frombuffer(content, dtype).reshape(shape)

    try:
        message = msgpack.unpackb(frames[0], ext_hook=extension, max_array_len=MAX_LIST, max_map_len=2**10)
    except WireError:
        raise
    except Exception as error:  # msgpack raises many kinds
        raise WireError(f"no message: {error!r}") from None
    if not isinstance(message, dict):
        raise WireError(f"a {type(message).__name__} in place of a message")
    return message


# --- what messages hold -------------------------------------------------------------------------------------


def plain_spec(spec: EnvSpec) -> dict[str, Any]:
    """A spec as JSON and msgpack hold it."""
    return {
        **vars(spec),
        "action": {
            "low": list(spec.action.low),
            "high": list(spec.action.high),
            "num_choices": spec.action.num_choices,
        },
        "image_shape": None if spec.image_shape is None else list(spec.image_shape),
        "tasks": [[task.name, task.instruction] for task in spec.tasks],
    }


def spec_of(plain: dict[str, Any]) -> EnvSpec:
    """Undo `plain_spec`."""
    action, image = plain["action"], plain["image_shape"]
    return EnvSpec(
        **{
            **plain,
            "action": ActionSpec(tuple(action["low"]), tuple(action["high"]), action["num_choices"]),
            "image_shape": None if image is None else tuple(image),
            "tasks": tuple(Task(*task) for task in plain["tasks"]),
        }
    )


def plain_settings(settings: EnvSettings) -> dict[str, Any]:
    """Settings as msgpack holds them."""
    return {**vars(settings), "fixed_actions": list(settings.fixed_actions.items())}


def settings_of(plain: dict[str, Any]) -> EnvSettings:
    """Undo `plain_settings`. Raises TypeError or ValueError for something else."""
    fixed = {int(dim): float(value) for dim, value in plain["fixed_actions"]}
    return EnvSettings(**{**plain, "observation": tuple(plain["observation"]), "fixed_actions": fixed})


# --- who may speak ------------------------------------------------------------------------------------------


def curve_keys(token: bytes, role: str) -> tuple[bytes, bytes]:
    """Public and secret CURVE key of the "server" or the "client" among those who know a token.

    Whoever knows the token has both pairs, so it proves each end to the other; CURVE encrypts and refuses replays.
    """
    seed = hashlib.scrypt(token, salt=f"embodied-rl env {role}".encode(), n=2**14, r=8, p=1, dklen=32)
    secret = zmq.utils.z85.encode(seed)
    return zmq.curve_public(secret), secret


def read_token(path: str) -> bytes:
    """The token in a file, without the space around it. Raises ValueError for one that is too short."""
    with open(path, "rb") as file:
        token = file.read().strip()
    if len(token) < MIN_TOKEN:
        raise ValueError(
            f"the token in {path} has {len(token)} bytes; at least {MIN_TOKEN} are needed: openssl rand -hex 32"
        )
    return token
