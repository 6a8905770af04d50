"""Attention weights of a prompt's own queries, from which most retain policies score its tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gpu_worker.kernels import observed_weight as kernels
from gpu_worker.kernels.observed_weight import reference
from gpu_worker.policies.retain import LayerRows

MAX_WEIGHTS = reference.MAX_WEIGHTS


def weight_tiles(
    rows: LayerRows, query_index: Tensor | None = None, max_weights: int = MAX_WEIGHTS
) -> Iterator[tuple[Tensor, Tensor]]:
    """Softmax weights of queries over every token that they can see, a few queries at a time, for policies that need
    more than `observed_weight` gives.

    query_index: int64 [H_q, T], places in `rows.queries`, of which the last is the prompt's last token, or -1 for
    padding; None: all. Yields weights float32 [H_q, t, n], 0 for what comes after the query, and the queries' positions
    int64 [H_q, t]. Padding is at -1, with arbitrary weights.
    """
    queries, positions = _placed(rows, query_index)
    for weights, tile in reference.weight_tiles(queries, rows.keys, positions, rows.scale, max_weights):
        yield weights, positions[:, tile]


def group_mean(of_heads: Tensor, num_kv_heads: int) -> Tensor:
    """Mean over each KV head's query heads: [H_q, ...] to [H_kv, ...]."""
    return of_heads.view(num_kv_heads, -1, *of_heads.shape[1:]).mean(dim=1)


def observed_weight(
    rows: LayerRows, query_index: Tensor | None = None, num_queries: Tensor | None = None
) -> Tensor:
    """The summed weight of every token over these queries, the mean over the group: float32 [H_kv, n].

    query_index: as for `weight_tiles`. num_queries: float32 or int64 [H_q], each head's sum is divided by its own
    before the mean; None: by nothing.
    """
    if query_index is None and num_queries is None:
        # Every layer of a prompt is asked so: nothing is made first.
        return kernels.observed_weight(rows.queries, rows.keys, None, None, rows.scale)
    queries, positions = _placed(rows, query_index)
    shares = torch.full((positions.shape[0],), 1 / rows.group_size, device=positions.device)
    if num_queries is not None:
        shares = shares / num_queries
    shares = shares[:, None].expand(positions.shape)
    return kernels.observed_weight(queries, rows.keys, positions, shares, rows.scale)


def _placed(rows: LayerRows, query_index: Tensor | None) -> tuple[Tensor, Tensor]:
    """These queries [H_q, T, d], and their positions int64 [H_q, T]; -1 for padding."""
    num_heads, width, head_dim = rows.queries.shape
    first = rows.keys.shape[1] - width
    if query_index is None:
        every = torch.arange(first, first + width, device=rows.keys.device)
        return rows.queries, every.expand(num_heads, -1)
    taken = query_index.clamp(min=0)
    queries = rows.queries.gather(1, taken[..., None].expand(-1, -1, head_dim))
    return queries, (first + taken).masked_fill(query_index < 0, -1)
