"""Blocks of shared memory: when one is used again, and what is left of them when a process ends."""

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ends import Background, run_script, send
from probes import LARGE, hold, take_and_give_back

from scheduler import shared_memory
from scheduler.shared_memory import HEADER, SENT, Arena, remove_orphans
from scheduler.transport import describe, discard, pack, unpack

# ---------------------------------------------------------------------------------------------- where it lies


@pytest.mark.parametrize("value", [np.zeros(LARGE, np.uint8), torch.zeros(LARGE, dtype=torch.uint8)])
def test_a_received_array_is_a_view_of_shared_memory(value: Any, arena: Arena) -> None:
    got = send(value)
    got[:] = 7
    assert bytes(arena.blocks[0].memory).count(b"\7" * LARGE) == 1


def test_a_block_is_used_again_once_its_arrays_are_dropped(arena: Arena) -> None:
    for _ in range(5):
        got = send([np.zeros(LARGE), torch.zeros(LARGE)])
        del got
    assert len(arena.blocks) == 1


@pytest.mark.parametrize(
    "keep",
    [
        lambda message: message[0],
        lambda message: message[0][5:8],
        lambda message: message[0].reshape(100, -1).T[3],
        lambda message: message[1],
        lambda message: message[1][5:8],
        lambda message: message[1].view(torch.int32)[::2],
        lambda message: message[1][5:8].numpy(),
        lambda message: memoryview(message[0]),
    ],
    ids=["array", "slice", "view of view", "tensor", "tensor slice", "tensor view", "array of tensor", "memoryview"],
)
def test_a_block_is_not_used_again_while_any_view_is_kept(keep: Any, arena: Arena) -> None:
    kept = keep(send([np.zeros(LARGE, np.float32), torch.zeros(LARGE)]))
    gc.collect()
    others = [send([np.ones(LARGE, np.float32), torch.ones(LARGE)]) for _ in range(3)]
    assert not np.asarray(kept).any()
    assert len(arena.blocks) == 4
    del kept, others
    send([np.ones(LARGE, np.float32), torch.ones(LARGE)])
    assert len(arena.blocks) == 4


def test_arrays_in_a_reference_cycle_release_their_block(arena: Arena) -> None:
    message: list[Any] = [send([np.zeros(LARGE), np.zeros(LARGE)])]
    message.append(message)
    del message
    gc.collect()
    assert arena.blocks[0].is_free()


def test_a_block_is_not_used_again_before_the_message_is_received(arena: Arena) -> None:
    frames = [pack(np.full(LARGE, i), "shared_memory") for i in range(3)]
    assert [unpack(message)[0] for message in frames] == [0, 1, 2]


def test_a_discarded_message_frees_its_block(arena: Arena) -> None:
    discard(pack(np.zeros(LARGE), "shared_memory"))
    assert arena.blocks[0].is_free()


def test_messages_of_many_threads_do_not_mix(arena: Arena) -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(30):
            got = send(np.full(LARGE, mark))
            if not (got == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(arena.blocks) <= 12  # one that a thread fills, and one that it still holds


def test_without_shared_memory_the_bytes_travel_in_the_message(arena: Arena) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        frames = pack(np.arange(LARGE * 10), "shared_memory")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert describe(frames)[0] == "inline"
    np.testing.assert_array_equal(unpack(frames), np.arange(LARGE * 10))


def test_free_blocks_of_other_sizes_make_room(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity, allocate = 3 * 2**20, os.posix_fallocate

    def small_disk(descriptor: int, offset: int, size: int) -> None:
        if size + sum(path.stat().st_size for path in arena.directory.iterdir()) > capacity:
            raise OSError(28, "No space left on device")
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", small_disk)
    kept = send(np.zeros(2**18, np.uint8))
    discard(pack(np.zeros(2**19, np.uint8), "shared_memory"))
    with arena.blocks[1].path.open("rb") as freed:
        frames = pack(np.ones(2 * 2**20, np.uint8), "shared_memory")
        assert os.fstat(freed.fileno()).st_size == 0  # a receiver that has mapped it keeps no memory
    assert describe(frames)[0] == "shared_memory"
    assert unpack(frames).all() and not kept.any()


def test_a_block_wastes_at_most_a_quarter(arena: Arena) -> None:
    for nbytes in (3 * 2**20 + 5, 2**22 - 1, 2**22, 50 * 10**6):
        block = arena.allocate(nbytes)
        assert block is not None and nbytes < block.size <= 1.26 * nbytes


# ---------------------------------------------------------------------------------------------- other processes


HOLDER = """
import sys, time, numpy
from pathlib import Path
from scheduler import shared_memory
shared_memory.READ_S = 0.1
arena = shared_memory.Arena(Path(sys.argv[1]))
arena.allocate(100000)
print(arena.prefix, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def receiver(arena: Arena) -> Iterator[tuple[multiprocessing.Process, Connection]]:
    """Another process that has received an array of ones and keeps it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    frames = [bytes(frame) for frame in pack(np.ones(LARGE), "shared_memory")]
    process = context.Process(target=hold, args=(frames, theirs))
    process.start()
    assert ours.poll(60) and ours.recv() == LARGE
    yield process, ours  # type: ignore[misc]
    process.kill()
    process.join()


def test_another_process_holds_a_block_until_it_drops_its_array(arena: Arena, receiver: Any) -> None:
    _, pipe = receiver
    assert not arena.blocks[0].is_free()
    pipe.send("drop")
    assert pipe.poll(60) and pipe.recv() == "dropped"
    assert arena.blocks[0].is_free()


def test_a_block_that_a_killed_process_held_is_used_again(arena: Arena, receiver: Any) -> None:
    process, _ = receiver
    process.kill()
    process.join()
    assert arena.blocks[0].is_free()


def test_a_block_is_never_free_while_another_process_takes_it(arena: Arena) -> None:
    block = arena.allocate(LARGE)
    assert block is not None
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=take_and_give_back, args=(block.name, block.size, theirs))
    process.start()
    assert ours.poll(60)
    seen, free = set(), False
    deadline = time.monotonic() + 60
    for _ in range(200_000):
        seen.add(HEADER.unpack_from(block.memory, 0)[0])
        free = free or block.is_free()
    while len(seen) == 1 and time.monotonic() < deadline:
        seen.add(HEADER.unpack_from(block.memory, 0)[0])
    ours.send("stop")
    process.join(60)
    assert seen == {SENT, process.pid} and not free


def test_a_forked_child_that_drops_an_array_leaves_it_to_its_parent(arena: Arena) -> None:
    kept = [send(np.zeros(LARGE))]
    child = os.fork()
    if child == 0:
        kept.clear()
        os._exit(0)
    os.waitpid(child, 0)
    assert not arena.blocks[0].is_free()


def test_a_forked_child_sends_from_blocks_of_its_own(arena: Arena) -> None:
    discard(pack(np.zeros(LARGE), "shared_memory"))
    child = os.fork()
    if child == 0:
        os._exit(0 if shared_memory.arena() is not arena else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_that_ends_leaves_its_parents_blocks(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from scheduler import shared_memory
arena = shared_memory.Arena(Path(sys.argv[1]))
shared_memory.HEADER.pack_into(arena.allocate(100000).memory, 0, shared_memory.FREE)
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print(len(list(Path(sys.argv[1]).iterdir())))
"""
    assert run_script(script, str(tmp_path)) == "2\n"  # the block, and the mark of its owner


def test_a_process_that_ends_waits_until_what_it_sent_is_received(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = pack(np.arange(LARGE), "shared_memory")
    monkeypatch.setattr(shared_memory, "READ_S", 60.0)
    ending = Background(arena.close)
    assert ending.waits
    received = unpack(frames)
    assert ending.result() is None
    np.testing.assert_array_equal(received, np.arange(LARGE))


def test_a_process_that_ends_leaves_nothing(tmp_path: Path) -> None:
    run_script(HOLDER, str(tmp_path), "0")
    assert list(tmp_path.iterdir()) == []


def test_blocks_of_a_killed_process_are_removed_by_the_next_and_those_of_a_living_are_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "60"]
    killed, living = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2))
    try:
        prefixes = [process.stdout.readline().strip() for process in (killed, living)]  # type: ignore[union-attr]
        killed.send_signal(signal.SIGKILL)
        killed.wait(60)
        assert {path.name.rsplit("-", 1)[0] for path in tmp_path.iterdir()} == set(prefixes)
        Arena(tmp_path)
        assert {path.name.rsplit("-", 1)[0] for path in tmp_path.iterdir()} == {prefixes[1]}
    finally:
        living.kill()
        living.wait(60)


def test_files_of_others_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "embodied-rl-1-abc").write_text("")
    (tmp_path / "psm_owner").write_text("")
    remove_orphans(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_message_whose_sender_has_gone_says_so(arena: Arena) -> None:
    frames = pack(np.zeros(LARGE), "shared_memory")
    arena.close()
    with pytest.raises(ConnectionError, match="the process that sent this message has ended"):
        unpack(frames)
    discard(frames)
