"""Blocks of shared memory that carry arrays from one process of a host to another.

The sender owns them: it takes one for each message and uses it again as soon as the receiver has dropped the arrays
that view it, or has died. A process that ends removes its blocks, after it has waited until what it sent is received,
for `READ_S` at most; those of a process that was killed are removed by the next that begins.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import secrets
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

PREFIX = "embodied-rl-arena-"
ALIGNMENT = 64
SMALLEST_BLOCK = 1 << 18
READ_S = 10.0  # how long a process that ends waits for receivers of what it sent, seconds
HEADER = struct.Struct("q")  # FREE, SENT, or the process id of the receiver that holds the block
FREE, SENT = -1, 0  # never the other way round: pack_into writes zeros first, and another process may see them

Place = tuple[str, int, list[tuple[int, int]]]  # a block's name and size, and (offset, length) of each buffer in it


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

    def put(self, buffers: Sequence[memoryview]) -> Place | None:
        """Copy the buffers of a message into a block; None if shared memory is exhausted."""
        block = self.allocate(sum(_aligned(buffer.nbytes) for buffer in buffers))
        return None if block is None else (block.name, block.size, block.fill(buffers))

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


def hold(name: str, size: int) -> np.ndarray:
    """A received block as bytes; the sender may reuse it when the last view of this array is gone.

    Raises ConnectionError if the sender has ended or the block is damaged.
    """
    memory = _attach(name, size)
    if memory.size() < size:  # reading past its end would kill this process
        raise ConnectionError(f"{name} has been cut to {memory.size()} of its {size} bytes")
    HEADER.pack_into(memory, 0, os.getpid())
    whole = np.frombuffer(memory, np.uint8)
    weakref.finalize(whole, _release, memory, os.getpid()).atexit = False
    return whole


def give_back(name: str, size: int) -> None:
    """Free a block whose message nobody will receive."""
    with suppress(ConnectionError):  # of another host, or of a sender that has ended
        HEADER.pack_into(_attach(name, size), 0, FREE)


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
