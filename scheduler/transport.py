"""How the bytes of a message move between two ends, chosen from where the ends are.

same process                by reference: nothing is copied
same host                   arrays and tensors by shared memory: one copy in, none out
different hosts             arrays inside the message, over TCP

`pack` turns an object into frames, `unpack` turns frames back. Large arrays travel out of band (pickle protocol 5),
so they are never pickled; a shared-memory block is reused as soon as the receiver has dropped the arrays that view it.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import secrets
import struct
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import msgpack
import numpy as np

Way = Literal["reference", "shared_memory", "inline"]

INLINE_BYTES = 16 * 1024  # below this a copy inside the message is cheaper than a block of shared memory
ALIGNMENT = 64
SMALLEST_BLOCK = 1 << 18
HEADER = struct.Struct("qq")  # state, process id of the holder
FREE, SENT, HELD = 0, 1, 2


@dataclass(frozen=True)
class Location:
    """Where an end of a channel lives."""

    host: str
    pid: int

    @staticmethod
    def here(host: str) -> Location:
        return Location(host, os.getpid())


def choose(sender: Location, receivers: Sequence[Location]) -> Way:
    """The best way from a sender to receivers of which any may get the message.

    With no known receiver the message is made readable from anywhere.
    """
    if receivers and all(receiver == sender for receiver in receivers):
        return "reference"
    if receivers and all(receiver.host == sender.host for receiver in receivers):
        return "shared_memory"
    return "inline"


# ---------------------------------------------------------------------------------------------- serialisation


def pack(obj: Any, way: Way) -> list[bytes | memoryview]:
    """Serialise `obj` into frames: a header, the pickle, and for `inline` one frame for each large array."""
    if way == "reference":
        token = next(_reference_ids)
        _references[token] = obj
        return [msgpack.packb(("reference", os.getpid(), token)), b""]
    body, buffers = _dump(obj)
    views = [buffer.raw() for buffer in buffers]
    if views and way == "shared_memory":
        block = arena().allocate(sum(_aligned(view.nbytes) for view in views))
        if block is not None:
            return [msgpack.packb(("shared_memory", block.name, block.size, block.fill(views))), body]
    return [msgpack.packb(("inline",)), body, *views]


def unpack(frames: Sequence[Any]) -> Any:
    """Rebuild the object of `pack`. Arrays view shared memory or the received frames; nothing is copied."""
    way, *rest = msgpack.unpackb(bytes(frames[0]))
    if way == "reference":
        return _references.pop(rest[1])
    if way == "shared_memory":
        name, size, spans = rest
        return pickle.loads(frames[1], buffers=_hold(name, size, spans))
    return pickle.loads(frames[1], buffers=[bytearray(frame) for frame in frames[2:]])


def discard(frames: Sequence[Any]) -> None:
    """Release what an undelivered message holds; a reference only the process that packed it can drop."""
    way, *rest = msgpack.unpackb(bytes(frames[0]))
    if way == "reference" and rest[0] == os.getpid():
        _references.pop(rest[1], None)
    elif way == "shared_memory":
        HEADER.pack_into(_attach(rest[0], rest[1]), 0, FREE, 0)


_references: dict[int, Any] = {}
_reference_ids = itertools.count()


def _dump(obj: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    for pickler_class in (_Pickler, _CloudPickler):
        stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()

        def out_of_band(buffer: pickle.PickleBuffer, buffers: list[pickle.PickleBuffer] = buffers) -> bool:
            if buffer.raw().nbytes < INLINE_BYTES:
                return True
            buffers.append(buffer)
            return False

        try:
            pickler_class(stream, protocol=5, buffer_callback=out_of_band).dump(obj)
            return stream.getvalue(), buffers
        except (pickle.PicklingError, AttributeError, TypeError):
            if pickler_class is _CloudPickler:
                raise
    raise AssertionError("unreachable")


class _TensorsAsArrays:
    """Reduce CPU tensors to NumPy arrays, which pickle out of band; torch's own reduction copies."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.device.type == "cpu":
            tensor = obj.detach().contiguous()
            if tensor.dtype == torch.bfloat16:
                return _bfloat16_from_array, (tensor.view(torch.int16).numpy(),)
            return _tensor_from_array, (tensor.numpy(),)
        parent = getattr(super(), "reducer_override", None)
        return parent(obj) if parent else NotImplemented


class _Pickler(_TensorsAsArrays, pickle.Pickler):
    pass


class _CloudPickler(_TensorsAsArrays, cloudpickle.Pickler):
    """Also takes lambdas and classes of `__main__`, at a price; used where the plain pickler gives up."""


def _tensor_from_array(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array)


def _bfloat16_from_array(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array).view(torch.bfloat16)


# ---------------------------------------------------------------------------------------------- shared memory


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Block:
    """One reusable piece of shared memory, owned by the sending process."""

    def __init__(self, name: str, size: int, memory: mmap.mmap) -> None:
        self.name, self.size, self.memory = name, size, memory

    def fill(self, views: Sequence[memoryview]) -> list[tuple[int, int]]:
        """Copy the buffers in; returns their (offset, length)."""
        target, spans, offset = np.frombuffer(self.memory, np.uint8), [], ALIGNMENT
        for view in views:
            target[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
            spans.append((offset, view.nbytes))
            offset += _aligned(view.nbytes)
        return spans

    @property
    def state(self) -> tuple[int, int]:
        state, holder = HEADER.unpack_from(self.memory, 0)
        return state, holder


class Arena:
    """The shared-memory blocks of one sending process, in sizes of powers of two."""

    def __init__(self, directory: Path | None = None) -> None:
        shm = Path("/dev/shm")
        self.directory = directory or (shm if shm.is_dir() else Path(os.environ.get("TMPDIR", "/tmp")))
        self.blocks: dict[int, list[Block]] = {}
        self.lock = threading.Lock()
        self.prefix = f"embodied-rl-{os.getpid()}-{secrets.token_hex(4)}"
        self.count = itertools.count()
        self._remove_orphans()
        weakref.finalize(self, _unlink_all, self.directory, self.prefix)

    def allocate(self, nbytes: int) -> Block | None:
        """A free block with room for `nbytes`, marked as sent; None if shared memory is exhausted."""
        size = max(SMALLEST_BLOCK, 1 << (nbytes + ALIGNMENT - 1).bit_length())
        with self.lock:
            blocks = self.blocks.setdefault(size, [])
            block = next((b for b in blocks if b.state[0] == FREE), None)
            block = block or next((b for b in blocks if b.state[0] == HELD and not _alive(b.state[1])), None)
            if block is None:
                block = self._create(size)
                if block is None:
                    return None
                blocks.append(block)
            HEADER.pack_into(block.memory, 0, SENT, 0)
            return block

    def _create(self, size: int) -> Block | None:
        path = self.directory / f"{self.prefix}-{next(self.count)}"
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # fails here if memory is short, not by a bus error later
            return Block(str(path), size, mmap.mmap(descriptor, size))
        except OSError:
            path.unlink()
            return None
        finally:
            os.close(descriptor)

    def _remove_orphans(self) -> None:
        """Remove the blocks of processes that were killed before they could."""
        for path in self.directory.glob("embodied-rl-*"):
            owner = path.name.split("-")[2]
            if owner.isdigit() and not _alive(int(owner)):
                path.unlink(missing_ok=True)


def _unlink_all(directory: Path, prefix: str) -> None:
    for path in directory.glob(f"{prefix}-*"):
        path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@lru_cache(maxsize=1)
def arena() -> Arena:
    """This process's arena."""
    return Arena()


@lru_cache(maxsize=256)
def _attach(name: str, size: int) -> mmap.mmap:
    descriptor = os.open(name, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _hold(name: str, size: int, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Views of a block's buffers; the block is released when the last of them is dropped."""
    memory = _attach(name, size)
    HEADER.pack_into(memory, 0, HELD, os.getpid())
    lease = _Lease(memory, len(spans))
    views = []
    for offset, length in spans:
        array = np.frombuffer(memory, np.uint8, count=length, offset=offset)
        weakref.finalize(array, lease.drop).atexit = False
        views.append(memoryview(array))  # type: ignore[arg-type]
    return views


class _Lease:
    def __init__(self, memory: mmap.mmap, count: int) -> None:
        self.memory, self.count, self.lock = memory, count, threading.Lock()

    def drop(self) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0:
                HEADER.pack_into(self.memory, 0, FREE, 0)
