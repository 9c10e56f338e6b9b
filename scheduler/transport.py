"""How the bytes of a message move between two ends, chosen from where the ends are.

same process                by reference: nothing is copied
same host, both see a GPU   CUDA tensors by CUDA IPC: one copy on the device, and one to another GPU; the rest as below
same host                   arrays and tensors by shared memory: one copy in, none out
different hosts             arrays inside the message, over TCP

`pack` turns an object into frames, `unpack` turns frames back. Large arrays travel out of band (pickle protocol 5),
so they are never pickled; a shared-memory block is reused as soon as the receiver has dropped the arrays that view it.
A process that ends waits until what it sent has been received, for `READ_S` at most.
Tensors arrive without their autograd graph, on the device of the same index as they had, or on the CPU if there is
none.
"""

from __future__ import annotations

import fcntl
import io
import itertools
import mmap
import os
import pickle
import secrets
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import msgpack
import numpy as np

from scheduler import cuda_memory

Way = Literal["reference", "cuda_ipc", "shared_memory", "inline"]

INLINE_BYTES = 16 * 1024  # below this a copy inside the message is cheaper than a block of shared memory
PREFIX = "embodied-rl-arena-"
ALIGNMENT = 64
SMALLEST_BLOCK = 1 << 18
READ_S = 10.0  # how long a process that ends waits for receivers of what it sent, seconds
HEADER = struct.Struct("q")  # FREE, SENT, or the process id of the receiver that holds the block
FREE, SENT = -1, 0  # never the other way round: pack_into writes zeros first, and another process may see them


@dataclass(frozen=True)
class Location:
    """Where an end of a channel lives; `gpus` are the names of those it sees."""

    host: str
    pid: int
    gpus: tuple[str, ...] = field(default=(), compare=False)

    @staticmethod
    def here(host: str) -> Location:
        return Location(host, os.getpid(), cuda_memory.visible())


def choose(sender: Location, receivers: Sequence[Location]) -> Way:
    """The best way from a sender to receivers of which any may get the message.

    With no known receiver the message is made readable from anywhere.
    """
    if receivers and all(receiver == sender for receiver in receivers):
        return "reference"
    if not receivers or any(receiver.host != sender.host for receiver in receivers):
        return "inline"
    apart = all(receiver.pid != sender.pid for receiver in receivers)  # CUDA opens no handle where it was made
    if sender.gpus and apart and all(set(sender.gpus) <= set(receiver.gpus) for receiver in receivers):
        return "cuda_ipc"
    return "shared_memory"


# ---------------------------------------------------------------------------------------------- serialisation


def pack(obj: Any, way: Way) -> list[bytes | memoryview]:
    """Serialise `obj` into frames: a header, the pickle, and one frame for each large array that lies nowhere else.

    What cannot go the given way (no CUDA tensors, no large arrays, no shared memory left) goes the next one.
    """
    if way == "reference":
        token = next(_reference_ids)
        _references[token] = obj
        return [msgpack.packb(("reference", 0, os.getpid(), token)), b""]
    body, buffers, device_bytes = _dump(obj, way == "cuda_ipc")
    views = [buffer.raw() for buffer in buffers]
    nbytes = len(body) + device_bytes + sum(view.nbytes for view in views)
    block = None
    if views and way != "inline":
        block = arena().allocate(sum(_aligned(view.nbytes) for view in views))
    taken = "cuda_ipc" if device_bytes else "shared_memory" if block else "inline"
    if block is None:
        return [msgpack.packb((taken, nbytes)), body, *views]
    return [msgpack.packb((taken, nbytes, block.name, block.size, block.fill(views))), body]


def unpack(frames: Sequence[Any]) -> Any:
    """Rebuild the object of `pack`; arrays that lay in shared memory are views of it.

    Raises ConnectionError if the sender's shared memory is gone or damaged.
    """
    way, _, *place = msgpack.unpackb(frames[0])
    if way == "reference":
        if place[0] != os.getpid():
            raise RuntimeError(f"process {place[0]} sent a reference, which only process {place[0]} itself can read")
        return _references.pop(place[1])
    if place:
        name, size, spans = place
        memory = memoryview(_hold(name, size))  # type: ignore[arg-type]
        return pickle.loads(frames[1], buffers=[memory[offset : offset + length] for offset, length in spans])
    return pickle.loads(frames[1], buffers=[bytearray(frame) for frame in frames[2:]])


def describe(frames: Sequence[Any]) -> tuple[Way, int]:
    """How a packed message travels, and its bytes, of which a reference has none."""
    way, nbytes, *_ = msgpack.unpackb(frames[0])
    return way, nbytes


def discard(frames: Sequence[Any]) -> None:
    """Release what an undelivered message holds; a reference only the process that packed it can drop."""
    way, _, *place = msgpack.unpackb(frames[0])
    if way == "reference" and place[0] == os.getpid():
        _references.pop(place[1], None)
    elif way != "reference" and place:
        with suppress(ConnectionError):  # of another host, or of a sender that has ended
            HEADER.pack_into(_attach(place[0], place[1]), 0, FREE)


_references: dict[int, Any] = {}
_reference_ids = itertools.count()


def _dump(obj: Any, over_ipc: bool) -> tuple[bytes, list[pickle.PickleBuffer], int]:
    """The pickle, the buffers beside it, and the bytes that stay on a GPU."""
    try:
        return _dump_with(_Pickler, obj, over_ipc)
    except (pickle.PicklingError, AttributeError, TypeError):
        return _dump_with(_cloud_pickler(), obj, over_ipc)


def _dump_with(pickler_class: type[_Pickler], obj: Any, over_ipc: bool) -> tuple[bytes, list[pickle.PickleBuffer], int]:
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < INLINE_BYTES:
            return True
        buffers.append(buffer)
        return False

    pickler = pickler_class(stream, protocol=5, buffer_callback=in_band)
    pickler.over_ipc = over_ipc
    pickler.dump(obj)
    return stream.getvalue(), buffers, pickler.device_bytes


class _Reducer:
    """Reduces what pickle would copy into its stream: tensors, and arrays that are not contiguous."""

    over_ipc = False
    device_bytes = 0

    def reduce(self, obj: Any) -> Any:
        if type(obj) is np.ndarray:
            contiguous = obj.flags.forc or obj.dtype.hasobject
            return NotImplemented if contiguous else np.ascontiguousarray(obj).__reduce_ex__(5)
        torch = sys.modules.get("torch")
        if torch is None or type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        if obj.device.type not in ("cpu", "cuda") or obj.layout is not torch.strided:
            return NotImplemented
        if type(obj) is torch.nn.Parameter:
            return torch.nn.Parameter, (obj.detach(), obj.requires_grad)
        tensor = obj.detach().contiguous().resolve_conj().resolve_neg()
        if tensor.device.type == "cuda":
            if not self.over_ipc:
                return cuda_memory.by_host(tensor)
            self.device_bytes += tensor.nbytes
            return cuda_memory.by_ipc(tensor)
        try:
            return _tensor_from_array, (tensor.numpy(),)
        except TypeError:  # NumPy lacks the type, bfloat16 for example: its bits travel as integers
            bits = getattr(torch, f"int{8 * tensor.element_size()}")
            return _tensor_from_array, (tensor.view(bits).numpy(), tensor.dtype)


class _Pickler(_Reducer, pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            raise pickle.PicklingError("the receiver has another __main__")
        return self.reduce(obj)


@lru_cache(maxsize=1)
def _cloud_pickler() -> Any:
    """Also takes lambdas and what `__main__` defines, at a price; used where the plain pickler gives up.

    Ray's own, for then a class that came with a worker and one that came with a message are the same class.
    """
    from ray import cloudpickle

    class CloudPickler(_Reducer, cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            reduced = self.reduce(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    return CloudPickler


def _tensor_from_array(array: np.ndarray, dtype: Any = None) -> Any:
    import torch

    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(dtype)


# ---------------------------------------------------------------------------------------------- sender's blocks


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Block:
    """One reusable piece of shared memory, owned by the sending process."""

    def __init__(self, path: Path, size: int, memory: mmap.mmap) -> None:
        self.path, self.name, self.size, self.memory = path, str(path), size, memory

    def fill(self, views: Sequence[memoryview]) -> list[tuple[int, int]]:
        """Copy the buffers in; returns their (offset, length)."""
        target, spans, offset = np.frombuffer(self.memory, np.uint8), [], ALIGNMENT
        for view in views:
            target[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
            spans.append((offset, view.nbytes))
            offset += _aligned(view.nbytes)
        return spans

    def is_free(self) -> bool:
        """Whether nobody reads it: the receiver has dropped what it got, or has died."""
        holder = HEADER.unpack_from(self.memory, 0)[0]
        return holder == FREE or (holder > 0 and not _alive(holder))

    def is_on_its_way(self) -> bool:
        """Whether its message lies in a queue or has not been unpacked yet."""
        return bool(HEADER.unpack_from(self.memory, 0)[0] == SENT)


class Arena:
    """The shared-memory blocks of one sending process."""

    def __init__(self, directory: Path | None = None) -> None:
        shm = Path("/dev/shm")
        self.directory = directory or (shm if shm.is_dir() else Path(tempfile.gettempdir()))
        self.prefix = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self.blocks: list[Block] = []
        self.lock = threading.Lock()
        self._count = itertools.count()
        self._claimed = False
        remove_orphans(self.directory)
        self.close = weakref.finalize(self, _end, self.blocks, self.directory, self.prefix, os.getpid())

    def allocate(self, nbytes: int) -> Block | None:
        """A free block with room for `nbytes`, marked as sent; None if shared memory is exhausted."""
        needed = nbytes + ALIGNMENT
        with self.lock:
            fitting = (b for b in self.blocks if needed <= b.size <= max(2 * needed, SMALLEST_BLOCK) and b.is_free())
            block = min(fitting, key=lambda b: b.size, default=None) or self._create(needed)
            if block is None and self._trim():
                block = self._create(needed)
            if block is not None:
                HEADER.pack_into(block.memory, 0, SENT)
            return block

    def _create(self, needed: int) -> Block | None:
        step = max(SMALLEST_BLOCK, 1 << (needed.bit_length() - 3))
        size = -(-needed // step) * step
        path = self.directory / f"{self.prefix}-{next(self._count)}"
        try:
            if not self._claimed:
                _claim(self.directory / f"{self.prefix}-owner")
                self._claimed = True
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)  # fails here if memory is short, not by a bus error later
                block = Block(path, size, mmap.mmap(descriptor, size))
            finally:
                os.close(descriptor)
        except OSError:
            path.unlink(missing_ok=True)
            return None
        self.blocks.append(block)
        return block

    def _trim(self) -> bool:
        """Give the memory of free blocks back; whether there were any."""
        free = [block for block in self.blocks if block.is_free()]
        for block in free:
            with suppress(FileNotFoundError):
                os.truncate(block.path, 0)  # else receivers that have mapped it would keep the memory
                block.path.unlink()
            self.blocks.remove(block)
        return bool(free)


def arena() -> Arena:
    """This process's arena; a forked child gets its own."""
    pid = os.getpid()
    if pid not in _arenas:
        _arenas.setdefault(pid, Arena())
    return _arenas[pid]


_arenas: dict[int, Arena] = {}


def remove_orphans(directory: Path = Path("/dev/shm")) -> None:
    """Remove the blocks of processes that were killed before they could do it."""
    for owner in directory.glob(f"{PREFIX}*-owner"):
        with suppress(OSError):  # removed meanwhile, or its process lives and holds the lock
            descriptor = os.open(owner, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _unlink_all(directory, owner.name.removesuffix("-owner"))
            finally:
                os.close(descriptor)


def _claim(owner: Path) -> None:
    """Lock a file for as long as this process lives. A process id would not do: containers that share /dev/shm
    do not share process ids."""
    while True:
        descriptor = os.open(owner, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if owner.exists():
            return
        os.close(descriptor)  # somebody took it for an orphan before it was locked


def _end(blocks: Sequence[Block], directory: Path, prefix: str, process: int) -> None:
    """Remove the memory of a process that ends: what was received stays where it is mapped, what was not is lost."""
    if os.getpid() != process:  # a forked child must not remove its parent's
        return
    deadline = time.monotonic() + READ_S
    try:
        while any(block.is_on_its_way() for block in blocks) and time.monotonic() < deadline:
            time.sleep(0.002)
    finally:
        _unlink_all(directory, prefix)


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


# ---------------------------------------------------------------------------------------------- receiver's views


def _hold(name: str, size: int) -> np.ndarray:
    """A received block as bytes; the sender may reuse it when the last view of this array is gone."""
    memory = _attach(name, size)
    if memory.size() < size:  # reading past its end would kill this process
        raise ConnectionError(f"{name} has been cut to {memory.size()} of its {size} bytes")
    HEADER.pack_into(memory, 0, os.getpid())
    whole = np.frombuffer(memory, np.uint8)
    weakref.finalize(whole, _release, memory, os.getpid()).atexit = False
    return whole


def _release(memory: mmap.mmap, holder: int) -> None:
    if os.getpid() == holder:  # a forked child has inherited the views, not the right to end them
        HEADER.pack_into(memory, 0, FREE)


@lru_cache(maxsize=256)
def _attach(name: str, size: int) -> mmap.mmap:
    try:
        descriptor = os.open(name, os.O_RDWR)
    except FileNotFoundError:
        raise ConnectionError(f"the process that sent this message has ended: {name} is gone") from None
    try:
        return mmap.mmap(descriptor, size)
    except ValueError as error:
        raise ConnectionError(f"{name} cannot be read: {error}") from None
    finally:
        os.close(descriptor)
