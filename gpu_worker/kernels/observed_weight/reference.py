"""The definition of observed weights, in float32 PyTorch, some queries at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# 256 MiB of float32: a long prompt's weights are seen some queries at a time.
MAX_WEIGHTS = 1 << 26


def observed_weight(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor | None,
    shares: Tensor | None,
    scale: float,
    max_weights: int = MAX_WEIGHTS,
) -> Tensor:
    """Softmax weights over the tokens that each query sees, times its share, summed over a KV head's queries.

    queries: bf16, fp16 or fp32 [H_q, T, d]. keys: of the same dtype [H_kv, n, d], n at least 1. positions: int64
    [H_q, T], the last token that a query sees; a negative one is padding, which counts for nothing, and whose query
    and share may be anything; None: the queries are the last T tokens'. shares: float32 [H_q, T]; None: one H_kv / H_q
    of each, for the mean over a group. scale: of the scores, above 0. Returns float32 [H_kv, n].
    """
    num_heads, width, _ = queries.shape
    if positions is None:
        num_tokens = keys.shape[1]
        positions = torch.arange(num_tokens - width, num_tokens, device=keys.device).expand(num_heads, -1)
    if shares is None:
        shares = torch.full(positions.shape, keys.shape[0] / num_heads, device=keys.device)
    total = torch.zeros(queries.shape[0], keys.shape[1], device=keys.device)
    shares = shares.masked_fill(positions < 0, 0.0)
    for weights, tile in weight_tiles(queries, keys, positions, scale, max_weights):
        total += weights.mul_(shares[:, tile, None]).sum(dim=1)
    return total.view(keys.shape[0], -1, keys.shape[1]).sum(dim=1)


def weight_tiles(
    queries: Tensor, keys: Tensor, positions: Tensor, scale: float, max_weights: int = MAX_WEIGHTS
) -> Iterator[tuple[Tensor, slice]]:
    """The weights themselves, of as many queries as have at most `max_weights`, or of one.

    Yields float32 [H_q, t, n], 0 for what a query does not see, and which of the T queries they are. Padding weighs
    the first token alone, for want of another sum to 1.
    """
    num_kv_heads, num_tokens, head_dim = keys.shape
    num_heads, width = positions.shape
    keys = keys.float()
    every = torch.arange(num_tokens, device=keys.device)
    step = max(1, max_weights // (num_heads * num_tokens))
    for begin in range(0, width, step):
        tile = slice(begin, begin + step)
        last = positions[:, tile, None]
        of_tile = queries[:, tile].float().masked_fill(last < 0, 0.0)
        # A group's heads are more queries of the same keys: no key is copied for each of them.
        grouped = of_tile.reshape(num_kv_heads, -1, head_dim) @ keys.transpose(1, 2)
        scores = grouped.view(num_heads, -1, num_tokens).mul_(scale)
        yield scores.masked_fill_(every > last.clamp(min=0), float("-inf")).softmax(dim=-1), tile
