"""How the bytes of a message move between two ends, chosen from where the ends are.

same process                by reference: nothing is copied
same host, both see a GPU   CUDA tensors by CUDA IPC: one copy on the device, and one to another GPU; the rest as below
same host                   arrays and tensors by shared memory: one copy in, none out
different hosts             arrays inside the message, over TCP

`pack` turns an object into frames, `unpack` turns frames back. Large arrays travel out of band (pickle protocol 5),
so they are never pickled; see `shared_memory` for where they lie between two processes of a host. Tensors arrive
without their autograd graph, on the device of the same index as they had, or on the CPU if there is none.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import FunctionType
from typing import Any, Literal

import msgpack
import numpy as np

from scheduler import cuda_memory, shared_memory

Way = Literal["reference", "cuda_ipc", "shared_memory", "inline"]

INLINE_BYTES = 16 * 1024  # below this a copy inside the message is cheaper than a block of shared memory


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
    place = shared_memory.arena().put(views) if views and way != "inline" else None
    taken = "cuda_ipc" if device_bytes else "shared_memory" if place else "inline"
    if place is None:
        return [msgpack.packb((taken, nbytes)), body, *views]
    return [msgpack.packb((taken, nbytes, *place)), body]


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
        memory = memoryview(shared_memory.hold(name, size))  # type: ignore[arg-type]
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
        shared_memory.give_back(place[0], place[1])


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
