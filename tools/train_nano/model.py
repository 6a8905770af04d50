"""The model in plain PyTorch; parameter names are Hugging Face's, so that a state dict is already the export."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_nano.config import ModelConfig


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [..., head_dim], of integer `positions` [...] (two equal halves, as in Llama)."""
    frequencies = theta ** (
        -torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    )
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embedding to x [..., T, head_dim] in x's dtype."""
    low, high = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-high, low], dim=-1) * sin.to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a scale, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each [B, heads, T, head_dim]."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def merge(self, heads: Tensor) -> Tensor:
        """Output projection of [B, heads, T, head_dim]."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass
class KVCache:
    """Keys and values of a batch, one [B, kv_heads, capacity, head_dim] pair per layer; `lengths` is int64 [B]."""

    keys: list[Tensor]
    values: list[Tensor]
    lengths: Tensor


class Llama(nn.Module):
    """Decoder with tied input and output embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # writers to the residual stream start small
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.002 if small else 0.02)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary tables of `positions`."""
        return rotary_tables(positions, self.config.head_dim, self.config.rope_theta)

    def blocks(self) -> Iterator[Block]:
        """The layers, by their own type."""
        return (cast(Block, layer) for layer in self.layers)

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Final hidden states [B, T, hidden] of token ids [B, T], with a residual stream of `dtype`."""
        cos, sin = self.tables(torch.arange(ids.shape[1], device=ids.device))
        x = self.embed_tokens(ids).to(dtype)
        for layer in self.blocks():
            x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., vocab]."""
        return F.linear(hidden, self.embed_tokens.weight)

    def prefill(self, ids: Tensor, lengths: Tensor, num_new: int) -> tuple[Tensor, KVCache]:
        """Logits [B, vocab] after the first `lengths` of right-padded ids [B, T], and a cache with room for more.

        Padding never shows: attention is causal, and decoding overwrites its cache entries.
        """
        cos, sin = self.tables(torch.arange(ids.shape[1], device=ids.device))
        cache = KVCache([], [], lengths.clone())
        x = self.embed_tokens(ids)
        for layer in self.blocks():
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + layer.self_attn.merge(heads)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            cache.keys.append(F.pad(k, (0, 0, 0, num_new)))
            cache.values.append(F.pad(v, (0, 0, 0, num_new)))
        last = x[torch.arange(len(ids), device=ids.device), lengths - 1]
        return self.logits(self.norm(last)), cache

    def decode(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Logits [B, vocab] after one more token each, ids [B]; appends to the cache."""
        rows = torch.arange(len(ids), device=ids.device)
        cos, sin = (table[:, None, None] for table in self.tables(cache.lengths))
        capacity = cache.keys[0].shape[2]
        visible = torch.arange(capacity, device=ids.device) <= cache.lengths[:, None]
        x = self.embed_tokens(ids)[:, None]
        for layer, keys, values in zip(self.blocks(), cache.keys, cache.values, strict=True):
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            keys[rows, :, cache.lengths] = k[:, :, 0]
            values[rows, :, cache.lengths] = v[:, :, 0]
            # the queries of a group share one KV head: fold them into its query length
            folded = q.unflatten(1, (keys.shape[1], -1)).squeeze(3)
            mask = visible[:, None, None]
            heads = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
            x = x + layer.self_attn.merge(heads.flatten(1, 2)[:, :, None])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        cache.lengths += 1
        return self.logits(self.norm(x[:, 0]))
