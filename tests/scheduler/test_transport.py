"""How messages move: what arrives, where it lies, and when its memory is used again."""

import gc
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ends import Background
from probes import LARGE, hold, take_and_give_back

from scheduler import cuda_memory, transport
from scheduler.transport import HEADER, SENT, Arena, Location, choose, describe, discard, pack, remove_orphans, unpack

HERE, OTHER_PROCESS, OTHER_HOST = Location("a", 1), Location("a", 2), Location("b", 1)


@dataclass
class Batch:
    observation: dict[str, Any]
    instruction: list[str]


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """An arena of the test's own, in place of the process's."""
    arena = Arena(tmp_path)
    monkeypatch.setitem(transport._arenas, os.getpid(), arena)
    monkeypatch.setattr(transport, "READ_S", 0.0)
    yield arena
    arena.close()


def send(value: Any) -> Any:
    return unpack(pack(value, "shared_memory"))


# ---------------------------------------------------------------------------------------------- the way


def test_all_receivers_in_the_senders_process_get_a_reference() -> None:
    assert choose(HERE, [HERE, HERE]) == "reference"


def test_receivers_on_one_host_share_memory() -> None:
    assert choose(HERE, [HERE, OTHER_PROCESS]) == "shared_memory"


@pytest.mark.parametrize("receivers", [[OTHER_HOST], [HERE, OTHER_HOST], []])
def test_a_receiver_elsewhere_or_unknown_gets_the_bytes_in_the_message(receivers: list[Location]) -> None:
    assert choose(HERE, receivers) == "inline"


@pytest.mark.parametrize(
    ("sender", "receiver", "way"),
    [
        (Location("a", 1, ("0",)), Location("a", 2, ("0",)), "cuda_ipc"),  # the same GPU
        (Location("a", 1, ("0", "1")), Location("a", 2, ("1", "0")), "cuda_ipc"),  # each has one, and sees the other
        (Location("a", 1, ("0",)), Location("a", 2, ("1",)), "shared_memory"),
        (Location("a", 1, ("0",)), Location("a", 2), "shared_memory"),
        (Location("a", 1), Location("a", 2, ("0",)), "shared_memory"),
        (Location("a", 1, ("0",)), Location("b", 2, ("0",)), "inline"),
        (Location("a", 1, ("0",)), Location("a", 1, ("0",)), "reference"),
    ],
)
def test_a_gpu_that_both_ends_see_is_used(sender: Location, receiver: Location, way: str) -> None:
    assert choose(sender, [receiver]) == way


def test_one_receiver_that_cannot_open_a_handle_is_enough_to_go_through_the_host() -> None:
    sender, other = Location("a", 1, ("0",)), Location("a", 2, ("0",))
    assert choose(sender, [other, Location("a", 3, ("1",))]) == "shared_memory"
    assert choose(sender, [other, sender]) == "shared_memory"
    assert choose(sender, [other, Location("b", 3, ("0",))]) == "inline"


def test_an_end_sees_the_gpus_that_its_process_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1f2e,3")
    assert Location.here("a").gpus == ("GPU-1f2e", "3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert Location.here("a").gpus == ()


def test_a_message_without_cuda_tensors_goes_by_shared_memory(arena: Arena) -> None:
    frames = pack([np.ones(LARGE), torch.ones(LARGE)], "cuda_ipc")
    assert describe(frames)[0] == "shared_memory"
    assert all(float(item.sum()) == LARGE for item in unpack(frames))


def test_a_small_message_goes_inside_whatever_the_way() -> None:
    assert [describe(pack(3, way))[0] for way in ("cuda_ipc", "shared_memory", "inline")] == ["inline"] * 3  # type: ignore[arg-type]


def test_a_cuda_tensor_arrives_on_the_cpu_where_there_is_no_such_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    tensor = torch.ones(3)
    assert cuda_memory._to_device(tensor, 1) is tensor


def test_a_handle_is_opened_under_the_receivers_index_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_cuda_tensor", lambda *arguments: arguments)
    assert cuda_memory._open("7", 1, ("a", "b", "c", "d", "e", "f", 0, "handle")) == (*"abcdef", 1, "handle")


def test_a_reference_is_the_object_itself() -> None:
    value = [object()]
    assert unpack(pack(value, "reference")) is value


def test_a_reference_of_another_process_is_refused() -> None:
    frames = pack("mine", "reference")
    way, nbytes, pid, token = transport.msgpack.unpackb(frames[0])
    with pytest.raises(RuntimeError, match="only process"):
        unpack([transport.msgpack.packb((way, nbytes, pid + 1, token)), b""])
    assert unpack(frames) == "mine"


def test_a_discarded_reference_is_dropped() -> None:
    before = len(transport._references)
    discard(pack([1], "reference"))
    assert len(transport._references) == before


# ---------------------------------------------------------------------------------------------- what arrives

ARRAYS = {
    "float32": np.arange(LARGE, dtype=np.float32),
    "uint8": np.arange(LARGE, dtype=np.uint8),
    "bool": np.arange(LARGE) % 3 == 0,
    "matrix": np.arange(LARGE, dtype=np.float64).reshape(200, 200),
    "fortran": np.asfortranarray(np.arange(LARGE, dtype=np.float64).reshape(200, 200)),
    "strided": np.arange(2 * LARGE, dtype=np.float32)[::2],
    "transposed": np.arange(LARGE).reshape(100, 20, 20).transpose(1, 2, 0),
    "structured": np.zeros(LARGE, [("reward", "f4"), ("done", "?")]),
    "0-d": np.array(3.5),
    "empty": np.zeros((0, 7), np.int32),
    "small": np.arange(3),
    "text": np.array(["pick", "place"]),
    "objects": np.array([{"a": 1}, None], dtype=object)[::-1],
}
TENSORS = {
    "float32": torch.arange(LARGE, dtype=torch.float32),
    "bfloat16": torch.arange(LARGE, dtype=torch.bfloat16),
    "float8": torch.ones(LARGE).to(torch.float8_e4m3fn),
    "bool": torch.arange(LARGE) % 3 == 0,
    "strided": torch.arange(2 * LARGE)[::2],
    "transposed": torch.arange(LARGE).reshape(200, 200).T,
    "expanded": torch.ones(1, 5).expand(LARGE, 5),
    "0-d": torch.tensor(3.5),
    "0-d bfloat16": torch.tensor(3.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 7),
    "empty bfloat16": torch.zeros(0, 7, dtype=torch.bfloat16),
    "conjugated": torch.complex(torch.ones(LARGE), torch.ones(LARGE)).conj(),
    "needs gradient": torch.ones(LARGE, requires_grad=True) * 2,
}


@pytest.mark.parametrize("way", ["shared_memory", "inline"])
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_arrives_equal_and_writable(name: str, way: transport.Way) -> None:
    sent = ARRAYS[name]
    got = unpack(pack(sent, way))
    np.testing.assert_array_equal(got, sent, strict=True)
    assert got.flags.writeable


@pytest.mark.parametrize("way", ["shared_memory", "inline"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_equal(name: str, way: transport.Way) -> None:
    sent = TENSORS[name]
    got = unpack(pack(sent, way))
    assert (type(got), got.dtype, got.shape) == (torch.Tensor, sent.dtype, sent.shape)
    if name == "float8":
        got, sent = got.float(), sent.float()
    assert torch.equal(got, sent)
    assert not got.requires_grad


def test_a_read_only_array_arrives_read_only() -> None:
    sent = np.arange(LARGE)
    sent.flags.writeable = False
    assert not send(sent).flags.writeable


def test_a_parameter_stays_a_parameter() -> None:
    frozen = torch.nn.Parameter(torch.ones(LARGE), requires_grad=False)
    for sent in (frozen, torch.nn.Parameter(torch.ones(LARGE))):
        got = send(sent)
        assert type(got) is torch.nn.Parameter
        assert got.requires_grad == sent.requires_grad
        assert torch.equal(got, sent)


def test_a_module_can_be_trained_where_it_arrives() -> None:
    got = send(torch.nn.Linear(300, 300))
    got(torch.ones(1, 300)).sum().backward()
    assert all(parameter.grad is not None for parameter in got.parameters())


def test_a_sparse_tensor_arrives_equal() -> None:
    sent = torch.eye(5).to_sparse()
    assert torch.equal(send(sent).to_dense(), torch.eye(5))


def test_arrays_inside_dataclasses_and_dicts_arrive(arena: Arena) -> None:
    image = np.arange(LARGE, dtype=np.uint8)
    got = send(Batch({"image": image, "mask": torch.ones(LARGE, dtype=torch.bool), "time": 3}, ["push"]))
    np.testing.assert_array_equal(got.observation["image"], image)
    assert got.observation["mask"].all() and got.observation["time"] == 3 and got.instruction == ["push"]
    assert len(arena.blocks) == 1


def test_one_array_sent_twice_in_a_message_arrives_as_one() -> None:
    sent = np.zeros(LARGE)
    first, second = send([sent, sent])
    assert first is second


@pytest.mark.parametrize("value", [ARRAYS["strided"], TENSORS["strided"], TENSORS["bfloat16"], TENSORS["transposed"]])
def test_large_arrays_are_not_pickled(value: Any) -> None:
    _, body, buffer = pack(value, "inline")
    assert len(body) < 1000
    assert memoryview(buffer).nbytes == value.nbytes


def test_what_plain_pickle_cannot_take_arrives() -> None:
    factor = 3
    assert send(lambda x: factor * x)(2) == 6


def test_classes_of_main_arrive_in_a_process_with_another_main(tmp_path: Path) -> None:
    script = """
import sys, pickle, dataclasses, numpy
from scheduler.transport import pack
@dataclasses.dataclass
class Message:
    array: numpy.ndarray
frames = pack(Message(numpy.arange(40000)), "inline")
pickle.dump([bytes(frame) for frame in frames], open(sys.argv[1], "wb"))
"""
    run_script(script, str(tmp_path / "frames"))
    got = unpack(pickle.loads((tmp_path / "frames").read_bytes()))
    np.testing.assert_array_equal(got.array, np.arange(40000))


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


def run_script(script: str, *args: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


HOLDER = """
import sys, time, numpy
from pathlib import Path
from scheduler import transport
transport.READ_S = 0.1
arena = transport.Arena(Path(sys.argv[1]))
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
        os._exit(0 if transport.arena() is not arena else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_that_ends_leaves_its_parents_blocks(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from scheduler import transport
arena = transport.Arena(Path(sys.argv[1]))
transport.HEADER.pack_into(arena.allocate(100000).memory, 0, transport.FREE)
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
    monkeypatch.setattr(transport, "READ_S", 60.0)
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
