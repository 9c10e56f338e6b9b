"""Files beside the main weights: `<module>--<step>_checkpoint.pt`, one for each part that OpenVLA does not have.

With FiLM the whole vision backbone is in such a file, adapters and all, and the one in the main file does not count.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from policies.openvla.checkpoint import CheckpointError
from policies.state_dicts import shapes, state_faults

State = dict[str, Tensor]

_BACKBONE = "vision_backbone"
_ALPHA = 16  # of adapters, or their rank where it is less
_DAMAGED = (OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, pickle.UnpicklingError)


def load_side_files(network: nn.Module, names: list[str], directory: Path) -> None:
    """Give parts of a network their weights. Raises as `check_side_files`."""
    for name, state in check_side_files(network, names, directory).items():
        network.get_submodule(name).load_state_dict(state)


def check_side_files(network: nn.Module, names: list[str], directory: Path) -> dict[str, State]:
    """The weights of parts of a network, by the names of the parts.

    Raises:
        CheckpointError: every key that is missing, unexpected or misshapen. And as `read_side_file`.
    """
    states = {name: read_side_file(directory, name) for name in names}
    faults = [
        f"{side_file(directory, name).name}:\n{found}"
        for name, state in states.items()
        if (found := state_faults(shapes(network.get_submodule(name).state_dict()), shapes(state)))
    ]
    if faults:
        raise CheckpointError(f"files in {directory} do not fit the model:\n" + "\n".join(faults))
    return states


def parts_beside(directory: Path) -> frozenset[str]:
    """Parts that have files beside the main weights, as far as they tell how the model is used."""
    parts = ("action_head", "proprio_projector", _BACKBONE)
    return frozenset(name for name in parts if any(directory.glob(f"{name}--*_checkpoint.pt")))


def side_file(directory: Path, name: str) -> Path:
    """The file of a part.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: there are several.
    """
    files = sorted(directory.glob(f"{name}--*_checkpoint.pt"))
    if not files:
        raise FileNotFoundError(f"{directory} has no {name}--<step>_checkpoint.pt")
    if len(files) > 1:
        raise CheckpointError(f"{directory} has several: {', '.join(file.name for file in files)}; keep one")
    return files[0]


def read_side_file(directory: Path, name: str) -> State:
    """The state dict of a part, adapters merged, in which no name tells how it was trained.

    Raises:
        CheckpointError: a file that is damaged or holds anything but tensors by their names, or adapters that do not
            fit the weights. And as `side_file`.
    """
    file = side_file(directory, name)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except _DAMAGED as error:
        why = f": {error}" if isinstance(error, OSError) else ""
        problem = "is damaged, was not downloaded as a whole, or holds more than a state dict"
        raise CheckpointError(f"{file} {problem}{why}") from None
    if fault := _not_a_state(state):
        raise CheckpointError(f"{file} holds {fault}; expected a state dict: tensors by their names")
    state = {key.removeprefix("module.").removeprefix(f"{_BACKBONE}."): tensor for key, tensor in state.items()}
    try:
        return _merged(state)
    except KeyError as error:
        raise CheckpointError(f"{file} holds an adapter, but not {error}, which it belongs to") from None
    except RuntimeError as error:
        raise CheckpointError(f"{file} holds an adapter that does not fit its weight: {error}") from None


def _not_a_state(content: object) -> str | None:
    """What a file holds in place of a state dict."""
    if not isinstance(content, dict):
        return f"a {type(content).__name__}"
    others = (item for item in content.items() if not (isinstance(item[0], str) and isinstance(item[1], Tensor)))
    return next((f"a {type(value).__name__} under {key!r}" for key, value in others), None)


def split_state(state: State, names: list[str]) -> tuple[State, dict[str, State]]:
    """The state dict of a network as the main file has it, and as the files of the given parts have it."""
    parts = {
        name: {key.removeprefix(f"{name}."): tensor for key, tensor in state.items() if key.startswith(f"{name}.")}
        for name in names
    }
    main = {key: tensor for key, tensor in state.items() if key.partition(".")[0] not in names}
    if _BACKBONE in parts:
        plain = {key: tensor for key, tensor in parts[_BACKBONE].items() if not re.search(r"\.(scale|shift)\.", key)}
        main |= {f"{_BACKBONE}.{key.replace('.block.', '.')}": tensor for key, tensor in plain.items()}
        parts[_BACKBONE] = {f"{_BACKBONE}.{key}": tensor for key, tensor in parts[_BACKBONE].items()}
    return main, parts


def save_side_files(directory: Path, parts: dict[str, State]) -> None:
    """Write the files of parts."""
    for name, state in parts.items():
        state = {key: tensor.detach().cpu().clone() for key, tensor in state.items()}
        torch.save(state, directory / f"{name}--latest_checkpoint.pt")


def _merged(state: State) -> State:
    """A state dict without adapters, their updates added to the weights."""
    merged = {key.replace(".base_layer.", "."): tensor for key, tensor in state.items() if ".lora_" not in key}
    for key, down in state.items():
        if key.endswith(".lora_A.default.weight"):
            up, weight = state[key.replace(".lora_A.", ".lora_B.")], key.replace(".lora_A.default.", ".")
            rank = len(down)
            update = up.flatten(1).float() @ down.flatten(1).float() * (min(rank, _ALPHA) / rank)
            merged[weight] = (merged[weight].float() + update.view_as(merged[weight])).to(merged[weight].dtype)
    return merged
