"""How messages move: what arrives, where it lies, and when its memory is used again."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ends import run_script, send
from probes import LARGE

from scheduler import cuda_memory, transport
from scheduler.shared_memory import Arena
from scheduler.transport import Location, choose, describe, discard, pack, unpack

HERE, OTHER_PROCESS, OTHER_HOST = Location("a", 1), Location("a", 2), Location("b", 1)


@dataclass
class Batch:
    observation: dict[str, Any]
    instruction: list[str]


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
