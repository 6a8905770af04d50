"""Chunked causal attention: the plain definition, and the same through PyTorch's fused attention on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

AttendChunk = Callable[[Tensor, Tensor, int, float], Tensor]

# 512 MiB of float32.
MAX_SCORES = 1 << 27


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the tokens of several prompts lie, packed one prompt behind another.

    num_queries, num_rows: of each prompt; the queries are its last tokens'. query_bounds, row_bounds: int32 [P + 1]
    on the device, where each begins and the last one ends.
    """

    num_queries: tuple[int, ...]
    num_rows: tuple[int, ...]
    query_bounds: Tensor
    row_bounds: Tensor

    @classmethod
    def of(cls, num_queries: Sequence[int], num_rows: Sequence[int], device: torch.device) -> Packed:
        bounds = [[0, *accumulate(counts)] for counts in (num_queries, num_rows)]
        # From memory that is not pinned the host would wait for all that is queued.
        host = torch.tensor(bounds, dtype=torch.int32, pin_memory=device.type == "cuda")
        query_bounds, row_bounds = host.to(device, non_blocking=True)
        return cls(tuple(num_queries), tuple(num_rows), query_bounds, row_bounds)

    def attend_each(self, attend: AttendChunk, query: Tensor, rows: Tensor, scale: float) -> Tensor:
        """Attention of one prompt after the other, each as a chunk of its own. Arguments as of `attend_prompts`."""
        own_rows = rows.split(self.num_rows, dim=1)
        begins = [total - last for total, last in zip(self.num_rows, self.num_queries, strict=True)]
        of_prompts = zip(query.split(self.num_queries), own_rows, begins, strict=True)
        return torch.cat([attend(own, seen, begin, scale) for own, seen, begin in of_prompts])


def attend_chunk_naive(query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
    """Exact causal attention of the tokens at `begin`, `begin` + 1, ...: the definition.

    query: [T, H_q, d]. rows: [H_kv, >= begin + T, 2d], K then V, of which the first begin + T tokens are read.
    Returns [T, H_q, d] in the query's dtype, computed in float32.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, end = rows.shape[0], begin + num_tokens
    grouped = query.view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).float()
    keys, values = rows[:, None, :end, :head_dim].float(), rows[:, None, :end, head_dim:].float()
    scores = grouped @ keys.transpose(-1, -2) * scale
    positions = torch.arange(end, device=query.device)
    future = positions[None, :] > positions[begin:, None]
    output = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ values
    return output.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim).to(query.dtype)


def attend_chunk(query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
    """`attend_chunk_naive` through PyTorch's fused attention: same arguments, same result within rounding."""
    num_tokens, _num_heads, head_dim = query.shape
    grouped = query.transpose(0, 1)[None]
    end = begin + num_tokens
    keys, values = rows[None, :, :end, :head_dim], rows[None, :, :end, head_dim:]
    if begin == 0 or num_tokens == 1:
        output = F.scaled_dot_product_attention(
            grouped, keys, values, is_causal=begin == 0, scale=scale, enable_gqa=True
        )
    else:
        output = _past_and_chunk(grouped, keys, values, begin, scale)
    return output[0].transpose(0, 1)


def attend_prompts(query: Tensor, rows: Tensor, packed: Packed, scale: float) -> Tensor:
    """`attend_chunk` of several prompts: each token attends those of its own prompt up to itself.

    query: [T, H_q, d]. rows: [H_kv, >= S, 2d], of which the first S = sum of `num_rows` are read. Both hold the prompts
    as `packed` says. Returns [T, H_q, d] in the query's dtype.
    """
    return packed.attend_each(attend_chunk, query, rows[:, : sum(packed.num_rows)], scale)


def reads_bounds(query: Tensor, rows: Tensor) -> bool:
    """Return whether `attend_prompts` of such tensors reads prompts' bounds on the device, and takes no more from
    `num_queries` and `num_rows` than the greatest of each and their sum."""
    return False


def _past_and_chunk(query: Tensor, keys: Tensor, values: Tensor, begin: int, scale: float) -> Tensor:
    """Two unmasked calls instead of one masked: a mask costs the CPU kernel twice the time of the past itself."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    group = query.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    past, past_lse = fused(query, keys[:, :, :begin], values[:, :, :begin], scale=scale)
    chunk, chunk_lse = fused(query, keys[:, :, begin:], values[:, :, begin:], is_causal=True, scale=scale)
    share = torch.sigmoid(past_lse - chunk_lse)[..., None].to(past.dtype)
    return past * share + chunk * (1 - share)


def attend_in_pieces(query: Tensor, rows: Tensor, begin: int, scale: float, max_scores: int) -> Tensor:
    """As `attend_chunk`, in float32, with at most `max_scores` scores at a time (more for a single query)."""
    num_tokens, num_heads, _head_dim = query.shape
    output = torch.empty_like(query)
    piece = max(1, max_scores // (num_heads * (begin + num_tokens)))
    for first in range(0, num_tokens, piece):
        part = query[first : first + piece]
        output[first : first + piece] = _attend(part, rows, begin + first, scale)
    return output


def _attend(query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, end = rows.shape[0], begin + num_tokens
    # A group's heads are more queries of the same keys: no key is copied for each of them.
    grouped = query.float().view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    keys, values = rows[:, :end, :head_dim].float(), rows[:, :end, head_dim:].float()
    scores = grouped.reshape(num_kv_heads, -1, head_dim) @ keys.transpose(1, 2)
    positions = torch.arange(end, device=query.device)
    future = positions > positions[begin:, None]
    scores.mul_(scale).view(num_kv_heads, -1, num_tokens, end).masked_fill_(future, float("-inf"))
    output = (scores.softmax(dim=-1) @ values).view(num_kv_heads, -1, num_tokens, head_dim)
    return output.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def plan_chunks(query: Tensor, rows: Tensor, scale: float) -> Iterator[None]:
    """Prepare attention of prompts of at most rows.shape[1] tokens, in chunks of at most query.shape[0]: one thing a
    turn, so that the caller may stop. Arguments as of `attend_chunk`, with any content. A CPU prepares nothing."""
    return iter(())
