"""Llama 2 in plain PyTorch, with the tensor names of published checkpoints.

Keys and values are returned with the result and given back to go on from it; nothing is kept in the module. Rotary
frequencies are computed where they are used, in float32: as a buffer, `module.to(bfloat16)` would round them.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policies.openvla.config import LlamaConfig

Attention = Literal["sdpa", "eager"]
KeyValue = tuple[Tensor, Tensor]


class Llama(nn.Module):
    """Decoder and language-model head."""

    def __init__(self, config: LlamaConfig, attention: Attention) -> None:
        super().__init__()
        self.model = Decoder(config, attention)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def logits(self, hidden: Tensor, ids: slice = slice(None)) -> Tensor:
        """Hidden states [..., D] -> float32 logits of the ids in a slice of the vocabulary [..., len(ids)]."""
        if type(self.lm_head) is nn.Linear:
            return F.linear(hidden, self.lm_head.weight[ids]).float()
        return self.lm_head(hidden)[..., ids].float()


class Decoder(nn.Module):
    """Embeddings, layers and final norm.

    Attributes:
        gradient_checkpointing: recompute layers in the backward pass.
    """

    def __init__(self, config: LlamaConfig, attention: Attention) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, attention) for _ in range(config.num_hidden_layers))
        self.norm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor, past: list[KeyValue] | None = None, keep: bool = True
    ) -> tuple[Tensor, list[KeyValue]]:
        """Run S tokens after the ones in `past`.

        Args:
            x: embeddings [N, S, D].
            positions: [N, S].
            mask: bool [N, 1, S or 1, K]; which of all K keys, past ones first, a token attends to.
            past: keys and values of each layer, [N, heads, K - S, head dim].
            keep: return keys and values.

        Returns:
            Hidden states after the final norm [N, S, D], and keys and values of each layer for all K tokens.
        """
        rotation = _rotation(positions, self.config, x.dtype)
        keys_values = []
        for index, layer in enumerate(self.layers):
            inputs = (x, rotation, mask, past[index] if past is not None else None)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x, key_value = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                x, key_value = layer(*inputs)
            if keep:
                keys_values.append(key_value)
        return self.norm(x), keys_values


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig, attention: Attention) -> None:
        super().__init__()
        self.input_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _SelfAttention(config, attention)
        self.post_attention_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _MLP(config)

    def forward(self, x: Tensor, rotation: KeyValue, mask: Tensor, past: KeyValue | None) -> tuple[Tensor, KeyValue]:
        attended, key_value = self.self_attn(self.input_layernorm(x), rotation, mask, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), key_value


class _SelfAttention(nn.Module):
    def __init__(self, config: LlamaConfig, attention: Attention) -> None:
        super().__init__()
        self.fused = attention == "sdpa"
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        heads, shared = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: KeyValue, mask: Tensor, past: KeyValue | None) -> tuple[Tensor, KeyValue]:
        split = lambda y: y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # noqa: E731
        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        q, k = _rotate(q, rotation), _rotate(k, rotation)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        key_value = k, v
        if self.groups > 1:
            k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        attend = F.scaled_dot_product_attention if self.fused else _eager_attention
        attended = attend(q, k, v, attn_mask=mask)
        return self.o_proj(attended.transpose(1, 2).flatten(2)), key_value


class _MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _RMSNorm(nn.Module):
    """Normalises in float32, rounds, then scales: the order decides the last bit in bfloat16."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def _rotation(positions: Tensor, config: LlamaConfig, dtype: torch.dtype) -> KeyValue:
    """Cosines and sines [N, 1, S, head dim] of rotary position embedding (Su et al., 2021)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=positions.device).float()
    frequencies = 1.0 / config.rope_theta ** (exponents / config.head_dim)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, rotation: KeyValue) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _eager_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    return scores.float().softmax(-1).to(q.dtype) @ v
