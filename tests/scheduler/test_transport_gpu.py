"""CUDA tensors between processes, on machines that have a GPU."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from probes import echo

from scheduler.cuda_memory import visible
from scheduler.transport import describe, pack, unpack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ELEMENTS = 1_000_000
SOON_S = 120.0


@pytest.fixture
def other() -> Iterator[Connection]:
    """A process that sees the GPUs in the opposite order: says what it has got."""
    names = list(visible()) or [str(index) for index in range(torch.cuda.device_count())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(reversed(names)))
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=echo, args=(theirs,))
        process.start()
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
        yield ours
        ours.send(None)
        process.join(SOON_S)
        assert process.exitcode == 0


def there(pipe: Connection, frames: list) -> Any:
    pipe.send([bytes(frame) for frame in frames])
    assert pipe.poll(SOON_S)
    return pipe.recv()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_tensor_goes_by_ipc_to_the_device_of_its_index(other: Connection, dtype: torch.dtype) -> None:
    for index in range(torch.cuda.device_count()):
        tensor = torch.ones(ELEMENTS, dtype=dtype, device=f"cuda:{index}")
        frames = pack({"weights": tensor, "on the host": torch.ones(ELEMENTS)}, "cuda_ipc")
        way, nbytes = describe(frames)
        assert way == "cuda_ipc" and nbytes >= tensor.nbytes + 4 * ELEMENTS
        tensor.zero_()  # after it was sent
        assert there(other, frames) == {
            "weights": (f"cuda:{index}", str(dtype), ELEMENTS),
            "on the host": ("cpu", "torch.float32", ELEMENTS),
        }


@pytest.mark.parametrize("way", ["shared_memory", "inline"])
def test_a_tensor_goes_through_the_host_to_the_device_of_its_index(other: Connection, way: Any) -> None:
    tensor = torch.arange(ELEMENTS, device="cuda", dtype=torch.float32).reshape(1000, -1).T
    frames = pack({"weights": tensor, "frozen": torch.nn.Parameter(tensor[:1], requires_grad=False)}, way)
    assert describe(frames)[0] == way
    total, first = int(tensor.double().sum()), int(tensor[:1].double().sum())
    assert there(other, frames) == {
        "weights": ("cuda:0", "torch.float32", total),
        "frozen": ("cuda:0", "torch.float32", first),
    }


def test_a_reference_stays_where_it_is() -> None:
    tensor = torch.ones(3, device="cuda")
    assert unpack(pack(tensor, "reference")) is tensor


def test_device_memory_is_free_again_once_the_receiver_has_dropped_it(other: Connection) -> None:
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        there(other, pack({"weights": torch.ones(ELEMENTS, device="cuda")}, "cuda_ipc"))
        torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() <= before + 4 * ELEMENTS
