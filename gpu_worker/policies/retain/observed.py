"""Attention weights of a prompt's own queries, from which most retain policies score its tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gpu_worker.policies.retain.base import LayerRows

# 256 MiB of float32: a long prompt's weights are seen some queries at a time.
MAX_WEIGHTS = 1 << 26


def weight_tiles(
    rows: LayerRows, query_index: Tensor | None = None, max_weights: int = MAX_WEIGHTS
) -> Iterator[tuple[Tensor, Tensor]]:
    """Softmax weights of queries over every token that they can see, a few queries at a time.

    query_index: int64 [H_q, T], places in `rows.queries`, of which the last is the prompt's last token; None: all.
    Yields weights float32 [H_q, t, n], 0 for what comes after the query, and the queries' positions int64 [H_q, t].
    """
    num_heads, width, head_dim = rows.queries.shape
    num_kv_heads, num_tokens, _ = rows.keys.shape
    if query_index is None:
        query_index = torch.arange(width, device=rows.keys.device).expand(num_heads, -1)
    keys, first = rows.keys.float(), num_tokens - width
    every = torch.arange(num_tokens, device=keys.device)
    step = max(1, max_weights // (num_heads * num_tokens))
    for index in query_index.split(step, dim=1):
        queries = rows.queries.gather(1, index[..., None].expand(-1, -1, head_dim)).float()
        positions = first + index
        # A group's heads are more queries of the same keys: no key is copied for each of them.
        grouped = queries.reshape(num_kv_heads, -1, head_dim) @ keys.transpose(1, 2)
        scores = grouped.view(num_heads, -1, num_tokens).mul_(rows.scale)
        yield scores.masked_fill_(every > positions[..., None], float("-inf")).softmax(dim=-1), positions


def group_mean(of_heads: Tensor, num_kv_heads: int) -> Tensor:
    """Mean over each KV head's query heads: [H_q, ...] to [H_kv, ...]."""
    return of_heads.view(num_kv_heads, -1, *of_heads.shape[1:]).mean(dim=1)


def observed_weight(rows: LayerRows, query_index: Tensor | None = None) -> Tensor:
    """Weight that every token gets from these queries, their sum, the mean over the group: float32 [H_kv, n]."""
    total = torch.zeros(rows.queries.shape[0], rows.keys.shape[1], device=rows.keys.device)
    for weights, _positions in weight_tiles(rows, query_index):
        total += weights.sum(dim=1)
    return group_mean(total, rows.keys.shape[0])
