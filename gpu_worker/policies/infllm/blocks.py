"""InfLLM's blocks: which of their tokens were attended most, and what stands for each block."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.policies.base import Plan

# 256 MiB of float32: a long prompt's weights are seen some queries at a time.
MAX_WEIGHTS = 1 << 26


def representatives(received: Tensor, keys: Tensor, repr_topk: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The mean key of each block's most attended tokens, float32 [H_kv, P, d], and how many they are, int64 [H_kv, P].

    received: float32 [H_kv, n], the weight that each of the first n tokens got; -inf for what represents nothing. keys:
    [H_kv, >= n, d].
    """
    num_kv_heads, num_tokens = received.shape
    head_dim, num_blocks = keys.shape[2], -(-num_tokens // block_size)
    padding = num_blocks * block_size - num_tokens
    padded = torch.nn.functional.pad(received, (0, padding), value=float("-inf"))
    of_blocks = padded.view(num_kv_heads, num_blocks, block_size)
    best = later_best(of_blocks, min(repr_topk, block_size))
    is_token = of_blocks.gather(2, best) > float("-inf")
    first = torch.arange(0, num_tokens, block_size, device=keys.device)[:, None]
    places = (first + best).clamp(max=num_tokens - 1).flatten(1)
    chosen = keys.gather(1, places[..., None].expand(-1, -1, head_dim)).float()
    total = (chosen.view(*best.shape, head_dim) * is_token[..., None]).sum(dim=2)
    counts = is_token.sum(dim=2)
    return total / counts.clamp(min=1)[..., None], counts


def later_best(scores: Tensor, count: int) -> Tensor:
    """Give the places of the `count` best scores of the last dimension, the best first; a tie goes to the later place.

    `torch.topk` leaves ties to the device.
    """
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :count]
    return scores.shape[-1] - 1 - order


def local_attention(queries: Tensor, keys: Tensor, plan: Plan, scale: float) -> Tensor:
    """Weight that each token gets from the queries that have it in their window, summed: float32 [H_kv, n].

    A query attends the sinks and the window, which ends with itself. queries: [H_q, w, d] of the last w tokens. keys:
    [H_kv, n, d].
    """
    (num_heads, num_queries, head_dim), (num_kv_heads, num_tokens, _) = queries.shape, keys.shape
    num_sink, width = plan.num_sink, max(1, plan.num_recent)
    received = torch.zeros(num_kv_heads, num_tokens, device=keys.device)
    every = torch.arange(num_tokens, device=keys.device)
    # No more queries at a time than the window is wide: a tile sees the sinks and less than two windows.
    reach = num_sink + 2 * width
    step = max(1, min(width, MAX_WEIGHTS // (num_heads * reach)))
    for begin in range(num_tokens - num_queries, num_tokens, step):
        end = min(begin + step, num_tokens)
        # The first token that one of them has in its window.
        low = min(max(num_sink, begin - width + 1), end)
        sinks, window = keys[:, : min(num_sink, end)], keys[:, low:end]
        positions = torch.cat([every[: sinks.shape[1]], every[low:end]])
        age = every[begin:end, None] - positions
        hidden = (age < 0) | ((age >= width) & (positions >= num_sink))
        first = begin - (num_tokens - num_queries)
        tile = queries[:, first : first + end - begin].float().reshape(num_kv_heads, -1, head_dim)
        scores = tile @ torch.cat([sinks, window], dim=1).float().transpose(1, 2) * scale
        scores = scores.view(num_kv_heads, -1, *age.shape).masked_fill_(hidden, float("-inf"))
        received[:, low:end] += scores.softmax(dim=-1).sum(dim=(1, 2))[:, sinks.shape[1] :]
    return received
