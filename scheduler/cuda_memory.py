"""CUDA tensors in messages: handed over on the device (CUDA IPC), or copied through the host.

Either way one arrives on the receiver's device of the same index. Devices are told apart by their names in
CUDA_VISIBLE_DEVICES, which all workers of one host take from the same list; indices differ from worker to worker.
"""

from __future__ import annotations

import os
from typing import Any

DEVICE = 6  # place of the device index among the arguments of torch's `rebuild_cuda_tensor`


def visible() -> tuple[str, ...]:
    """Names of the GPUs this process can use, by index; none if it was not told which."""
    return tuple(name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name)


def by_ipc(tensor: Any) -> tuple:
    """Reduce a tensor to a handle of a copy on its device, which stays there until the receiver drops it.

    The sender may write into its own tensor meanwhile. If nobody ever receives it, the copy ends with the sender.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    index = tensor.device.index
    return _open, (visible()[index], index, reduce_tensor(tensor.clone())[1])


def by_host(tensor: Any) -> tuple:
    """Reduce a tensor to its copy in host memory."""
    return _to_device, (tensor.cpu(), tensor.device.index)


def _open(name: str, index: int, arguments: tuple) -> Any:
    """Map the sender's memory; on another GPU copy it over, directly if the two are peers."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    local = visible().index(name)
    own = list(arguments)
    own[DEVICE] = local
    tensor = rebuild_cuda_tensor(*own)
    return tensor if local == index else tensor.to(f"cuda:{index}")


def _to_device(tensor: Any, index: int) -> Any:
    import torch

    return tensor.to(f"cuda:{index}") if index < torch.cuda.device_count() else tensor
