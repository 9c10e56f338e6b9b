"""Calls a policy server (`embodied-rl serve-policy`, or one of openpi): needs numpy, msgpack and websockets, no torch.

The wire is openpi's: a websocket, on which the server says what it has, and then answers each observation with actions;
messages are msgpack maps with arrays in them. What lies here runs on a robot's PC as it is.
"""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack
from typing import Any

import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect


class PolicyClient:
    """A connection to a policy server, such as "ws://127.0.0.1:8000"; `metadata` is what the server says of itself."""

    def __init__(self, address: str, token: str | None = None, timeout_s: float = 60.0) -> None:
        headers = {"Authorization": f"Api-Key {token}"} if token else None
        self._timeout_s = timeout_s
        self._open = ExitStack()
        options: dict[str, Any] = {"compression": None, "max_size": None, "open_timeout": timeout_s, "close_timeout": 1}
        self._socket = self._open.enter_context(connect(address, additional_headers=headers, **options))
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))  # for a server that takes nothing in
        self._socket.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.metadata: dict[str, Any] = unpack(self._receive())

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Actions [C, A] under "actions". Raises RuntimeError with what the server did not like.

        Raises TimeoutError where none came in time, and ends the connection: they would be taken for the next answer.
        So it does where the server takes nothing in.

        Args:
            observation: `state` [S] float32, `image` [V, H, W, 3] uint8, `instruction`; of several envs with one more
                dimension in front. openpi's names `observation/state`, `observation/image`, `observation/wrist_image`
                and `prompt` mean the same.
        """
        try:
            self._socket.send(pack(observation))
        except ConnectionClosed as error:
            if isinstance(error.__cause__, BlockingIOError):
                raise TimeoutError(f"the server took nothing in for {self._timeout_s:g} s") from error
            raise
        answer = self._receive()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return unpack(answer)

    def close(self) -> None:
        self._open.close()

    def _receive(self) -> Any:
        try:
            return self._socket.recv(timeout=self._timeout_s)
        except BaseException:
            self.close()
            raise


def pack(message: Any) -> bytes:
    """msgpack with arrays as openpi writes them."""
    return msgpack.packb(message, default=_pack_array)


def unpack(data: bytes) -> Any:
    """Undo `pack`. Raises ValueError for what is no such message."""
    try:
        return msgpack.unpackb(data, object_hook=_unpack_array, max_array_len=2**16, max_map_len=2**10)
    except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException) as error:
        raise ValueError(f"no message: {error!r}") from None


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise TypeError(f"{type(value).__name__} {getattr(value, 'dtype', '')} cannot be sent")
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def _unpack_array(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" not in value and b"__npgeneric__" not in value:
        return value
    dtype = np.dtype(value[b"dtype"])
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of {dtype}")
    if b"__npgeneric__" in value:
        return dtype.type(value[b"data"])
    return np.frombuffer(value[b"data"], dtype).reshape(value[b"shape"])
