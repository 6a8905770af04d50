"""Launches of the programs over chunks."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_worker.policies.protokv.chunks.programs import score_chunk, sum_chunk
from gpu_worker.policies.protokv.chunks.reference import chunk_length

# Of a tile: 64 numbers a thread. A chunk is some tiles: what a warp has at once hides more than what fills an SM.
TILE_ELEMENTS = 2048
NUM_WARPS = 1
MOST_ROWS = 64


def irregularity(keys: Tensor, num_chunks: int) -> Tensor:
    """See the reference. On a CUDA device; the keys' last stride is 1."""
    num_heads, num_rows, width = keys.shape
    length = chunk_length(num_rows, num_chunks)
    scores = torch.empty(num_heads, num_rows, dtype=torch.float32, device=keys.device)
    if num_heads:
        score_chunk[(num_heads * num_chunks,)](
            keys, scores, *keys.stride()[:2], length, num_rows, num_heads, num_chunks,
            **_tile(length, width), num_warps=NUM_WARPS,
        )  # fmt: skip
    return scores


def chunk_sums(keys: Tensor, num_chunks: int, is_member: Tensor | None = None) -> Tensor:
    """See the reference. All on one CUDA device; the keys' last stride is 1. What is no member is not read."""
    num_heads, num_rows, width = keys.shape
    length = chunk_length(num_rows, num_chunks)
    sums = torch.empty(num_heads, num_chunks, width, dtype=torch.float32, device=keys.device)
    if num_heads:
        members = None if is_member is None else is_member.view(torch.uint8)
        sum_chunk[(num_heads * num_chunks,)](
            keys, members, sums, *keys.stride()[:2], *((0, 0) if members is None else members.stride()),
            length, num_rows, num_heads, num_chunks,
            **_tile(length, width), num_warps=NUM_WARPS,
        )  # fmt: skip
    return sums


def _tile(length: int, width: int) -> dict[str, int]:
    """Width, and a tile that holds a chunk where it may."""
    lanes = max(16, triton.next_power_of_2(width))
    most = max(1, min(MOST_ROWS, TILE_ELEMENTS // lanes))
    return {"WIDTH": width, "LANES": lanes, "ROWS": min(max(16, triton.next_power_of_2(length)), most)}
