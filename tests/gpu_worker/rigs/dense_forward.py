"""A whole forward pass over one sequence with naive causal attention: the simplest engine there can be."""

from __future__ import annotations

import torch

from gpu_worker.models import Decoder


def causal_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """One sequence: queries [T, num_heads, d], keys and values [T, num_kv_heads, d] to [T, num_heads, d]."""
    group_size = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group_size, 1), values.repeat_interleave(group_size, 1)
    scores = torch.einsum("thd,shd->hts", queries, keys).float() * scale
    length = queries.shape[0]
    unseen = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    if window is not None:
        unseen |= torch.ones_like(unseen).tril(-window)
    weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights.to(values.dtype), values)


@torch.inference_mode()
def dense_forward(decoder: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [T] of one sequence to logits float32 [T, vocab_size]."""
    positions = torch.arange(len(token_ids), device=token_ids.device)
    hidden = decoder.embed(token_ids)
    for layer, spec in enumerate(decoder.config.attentions):
        queries, keys, values = decoder.project_qkv(layer, hidden, positions)
        attention = causal_attention(queries, keys, values, spec.scale, spec.window)
        hidden = decoder.finish_layer(layer, hidden, attention)
    return decoder.logits(hidden)
