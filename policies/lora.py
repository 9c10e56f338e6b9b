"""Low-rank adapters (Hu et al., 2021) through peft: placed inside a module, loaded, and merged into its weights."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from policies.state_dicts import shapes, state_faults

_log = logging.getLogger(__name__)

_ADAPTABLE = (nn.Linear, nn.Conv2d, nn.Embedding)


@dataclass(frozen=True)
class LoRASettings:
    """Adapters to train.

    Attributes:
        rank: of the update of each weight.
        alpha: the update is scaled by alpha / rank.
        targets: names of modules, or the last parts of such names.
    """

    rank: int = 32
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_lora(module: nn.Module, settings: LoRASettings) -> list[str]:
    """Put adapters inside a module; everything else in it is frozen. Adapters are float32.

    Returns:
        Names of the modules that have one; a module that was frozen before gets none.

    Raises:
        ValueError: a target that matches no trainable linear layer, convolution or embedding.
    """
    pattern = "|".join(re.escape(name) for name in _matches(module, settings.targets))
    _inject(module, _peft().LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=pattern))
    return _adapted(module)


def load_adapter(module: nn.Module, directory: Path) -> list[str]:
    """Put a stored adapter (peft's format) inside a module; everything else in it is frozen.

    Returns:
        Names of the modules that have one.

    Raises:
        FileNotFoundError: no adapter there.
        ValueError: the adapter does not fit the module; every key that is missing, unexpected or misshapen is listed.
    """
    files = [directory / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{directory} is no LoRA adapter: it has no {file.name}")
    config = _peft().LoraConfig.from_pretrained(str(directory))
    config.inference_mode = False
    _inject(module, config)
    own = {name: parameter for name, parameter in module.named_parameters() if ".lora_" in name}
    given = {_own_name(key): tensor for key, tensor in load_file(files[1]).items()}
    faults = state_faults(shapes(own), shapes(given))
    if faults:
        raise ValueError(f"the adapter in {directory} does not fit:\n{faults}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(given[name])
    return _adapted(module)


def describe(names: list[str]) -> list[str]:
    """A short list of many names: those that differ in numbers only become one, with their count."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return [f"{name} x {count}" for name, count in counts.items()]


def merged_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The state dict that the module would have without adapters, their updates added to the weights."""
    state = {k.replace(".base_layer.", "."): v for k, v in module.state_dict().items() if ".lora_" not in k}
    for name in _adapted(module):
        layer: Any = module.get_submodule(name)
        key, update = f"{name}.weight", layer.get_delta_weight("default")
        state[key] = (state[key].float() + update.float()).to(state[key].dtype)
    return state


def _matches(module: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Names of the trainable modules that the targets match."""
    adaptable = (name for name, part in module.named_modules() if isinstance(part, _ADAPTABLE))
    candidates = [name for name in adaptable if _trainable(module.get_submodule(name))]
    matches = {t: [name for name in candidates if f".{name}".endswith(f".{t}")] for t in targets}
    missed = [target for target, names in matches.items() if not names]
    if missed or not targets:
        last_parts = sorted({name.rpartition(".")[2] for name in candidates})
        raise ValueError(
            f"LoRA targets that match no trainable module: {missed}; last parts of names: {', '.join(last_parts)}"
        )
    wanted = {name for names in matches.values() for name in names}
    return [name for name in candidates if name in wanted]


def _inject(module: nn.Module, config: Any) -> None:
    _peft().inject_adapter_in_model(config, module)
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    _log.info("LoRA adapters: %s", ", ".join(describe(_adapted(module))))


def _adapted(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if hasattr(part, "lora_A")]


def _own_name(key: str) -> str:
    """`base_model.model.X.lora_A.weight` -> `X.lora_A.default.weight`."""
    return re.sub(r"(\.lora_\w+)", r"\1.default", key.removeprefix("base_model.model."))


def _trainable(module: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in module.parameters())


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError("LoRA needs peft: pip install 'embodied-rl[vla]'") from error
    return peft
