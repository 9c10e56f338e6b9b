"""Checkpoints in the published format: safetensors, in one file or in shards, beside their configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from policies.openvla.config import OpenVLAConfig, read_json_object
from policies.openvla.processor import Processor
from policies.state_dicts import Shapes, shapes, state_faults

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class CheckpointError(ValueError):
    """Weights that do not fit the model."""


def load_weights(model: nn.Module, directory: Path, dtype: torch.dtype) -> None:
    """Give a model that was built on the meta device the weights of a checkpoint. Raises as `check_weights`."""
    for file in check_weights(model, directory):
        with safe_open(file, "pt") as tensors:
            # Copies: kernels round differently on memory-mapped tensors, which may be unaligned.
            state = {
                key: tensors.get_tensor(key).to(dtype, copy=True)
                for key in tensors.keys()  # noqa: SIM118
            }
        model.load_state_dict(state, strict=False, assign=True)


def check_weights(model: nn.Module, directory: Path) -> list[Path]:
    """The files with the weights of a model, of which only names and shapes are read.

    Raises:
        FileNotFoundError: no weights, or a shard that the index names is not there.
        CheckpointError: a damaged file; or every key that is missing, unexpected or misshapen, over all shards.
    """
    files = _files(directory)
    given: Shapes = {}
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                given |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged, or was not downloaded as a whole: {error}") from None
    faults = state_faults(shapes(model.state_dict()), given)
    if faults:
        raise CheckpointError(f"the weights in {directory} do not fit its config.json:\n{faults}")
    return files


def save_checkpoint(
    directory: Path,
    state: dict[str, Tensor],
    config: OpenVLAConfig,
    processor: Processor,
    beside: Path | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a checkpoint in the published format, data types as they are.

    Args:
        directory: where to.
        state, config, processor: what to write; weights without adapters.
        beside: the checkpoint it came from; its code and the settings of its tokenizer are copied.
        shard_bytes: a larger model is written in several files.

    Raises:
        FileExistsError: there is one already.
    """
    if (directory / "config.json").exists():
        raise FileExistsError(f"{directory} holds a checkpoint already")
    directory.mkdir(parents=True, exist_ok=True)
    for file in beside.iterdir() if beside else ():
        if file.suffix in (".json", ".py", ".model") and file.name != _INDEX:
            shutil.copyfile(file, directory / file.name)
    _save_weights(directory, state, shard_bytes)
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    written = {**config.written, "norm_stats": config.norm_stats, "torch_dtype": dtype}
    _write_json(directory / "config.json", written)
    _write_json(directory / "dataset_statistics.json", config.norm_stats)
    _write_json(directory / "preprocessor_config.json", processor.written)
    processor.tokenizer.tokenizer.save(str(directory / "tokenizer.json"))


def _files(directory: Path) -> list[Path]:
    if (directory / _INDEX).is_file():
        shards = read_json_object(directory / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{directory / _INDEX} has no weight_map that gives a file for each tensor")
        files = [directory / name for name in sorted(set(shards.values()))]
    else:
        files = [directory / _WHOLE]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise FileNotFoundError(f"{directory} has no {', '.join(absent)}")
    return files


def _save_weights(directory: Path, state: dict[str, Tensor], shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in state.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], directory / _WHOLE, metadata={"format": "pt"})
        return
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, directory / name, metadata={"format": "pt"})
    _write_json(
        directory / _INDEX,
        {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in state.values())},
            "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
        },
    )


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
