"""Scoring by keys at two bits a coordinate in Triton: two launches, of which one reads the codes, once.

A head here is one KV head of one lane.

1. `round_queries`, some programs a head: the group's queries, rotated and rounded to 8 bits, and what each head's
   softmax sums to over the sinks and over a share of the sampled candidates.
2. `weigh_codes`, a program some tiles of a head: one shift and one mask of 32 bits bring out four codes as bytes, and
   int8 tensor cores multiply these by all of the group's queries. What remains for a token and query head is a
   conversion, two multiply-adds and an exponential. Scores are written once.

Exact totals would need a second pass over the codes, or another over what the first had written.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.attention.kernel import is_interpreted
from gpu_worker.policies.bitkeys.bit_score.programs import round_queries, weigh_codes
from gpu_worker.policies.bitkeys.bit_score.reference import LOG2_E, NUM_SAMPLES, level_base

# Programs of a head that share its samples, where heads are few and where they are many; four an SM of an H200 are few.
MOST_SHARES, LEAST_SHARES = 4, 2
FEW_ROUNDING = 528
ROUNDING_WARPS = 4
# Positions of a program at a time; and rows of products, 16 for each of its warps.
TILE = 256
LEAST_ROWS = 64
WEIGHING_WARPS = 4
# Six for each of the 132 SMs of an H200; more than enough for smaller devices.
PROGRAMS = 792
# What a program does before its first tile, in tiles.
SETUP_TILES = 1


def bit_score(
    query: Tensor,
    rotation: Tensor,
    codes: Tensor,
    scales: Tensor,
    sinks: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    scale: float,
    num_positions: int,
) -> Tensor:
    """See the reference. All on one CUDA device; codes, scales and sinks may be views of one layer."""
    batch, num_kv_heads = query.shape[0], codes.shape[1]
    scores = torch.empty(batch, num_kv_heads, num_positions, dtype=torch.float32, device=query.device)
    if scores.numel():
        # Nothing is taken here.
        weigh(query, rotation, codes, scales, sinks, (seats, begin, end, end), scale, num_positions, scores)
    return scores


def weigh(
    query: Tensor,
    rotation: Tensor,
    codes: Tensor,
    scales: Tensor,
    sinks: Tensor,
    spans: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    num_positions: int,
    target: Tensor,
) -> None:
    """Write what candidates weigh. spans: seats, begin, end, counts. target: the scores; or int8 [B * H_kv, M], the
    weights' levels where counts are taken, 0 where there is no candidate, in the tiles that have one; M whole tiles."""
    batch, num_heads, head_dim = query.shape
    num_kv_heads, num_bytes = codes.shape[1], codes.shape[3]
    group, rows = num_heads // num_kv_heads, batch * num_kv_heads
    seats, begin, end, counts = (each.contiguous() for each in spans)
    shares = MOST_SHARES if rows * MOST_SHARES <= FEW_ROUNDING else LEAST_SHARES
    rounded = torch.empty(rows, group, head_dim, dtype=torch.int8, device=query.device)
    # Of every query head: what a step of its products is worth, what is added to them, and the shares' totals.
    worths = torch.empty(rows, group, 2 + shares, dtype=torch.float32, device=query.device)
    # A dot of bytes needs 32 of them, and products come in eights.
    heads, width = triton.next_power_of_2(group), triton.next_power_of_2(num_bytes)
    strides = (*codes.stride()[:2], *scales.stride()[:2])
    sizes = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "NUM_BYTES": num_bytes,
        "SHARES": shares,
        "IS_PLAIN": is_interpreted(),
    }
    round_queries[(rows, shares)](
        query.contiguous(), rotation, codes, scales, sinks, seats, begin, end, rounded, worths,
        num_kv_heads, num_positions, sinks.shape[2], scale * LOG2_E, *strides, *sinks.stride()[:2],
        **sizes, WIDTH=max(16, heads), BYTES=max(32, width), DIMS=max(16, triton.next_power_of_2(head_dim)),
        SINKS=max(16, triton.next_power_of_2(sinks.shape[2])), SAMPLES=NUM_SAMPLES // shares,
        num_warps=ROUNDING_WARPS,
    )  # fmt: skip
    peers = _peers(group)
    token_rows = max(LEAST_ROWS, TILE // peers)
    tile, length = token_rows * peers, codes.shape[2]
    num_tiles = triton.cdiv(num_positions, tile)
    chunk_tiles = _chunk_tiles(rows, num_tiles, PROGRAMS)
    span = max(32 // peers, width)
    weigh_codes[(triton.cdiv(num_tiles, chunk_tiles), rows)](
        codes, scales, seats, begin, end, counts, rounded, worths, target, num_kv_heads, num_positions,
        tile * chunk_tiles, target.shape[-1], length, level_base(group), *strides, **sizes, HEADS=heads, SPAN=span,
        PEERS=peers, ROWS=token_rows, IS_LEVELS=target.dtype == torch.int8,
        IS_WHOLE=length % tile == 0 and span == num_bytes, num_warps=WEIGHING_WARPS,
    )  # fmt: skip


def _peers(group: int) -> int:
    """Adjacent tokens of a row of products: eight columns, or more of a large group."""
    return max(1, 8 // triton.next_power_of_2(group))


@cache
def _chunk_tiles(rows: int, num_tiles: int, programs: int) -> int:
    """Tiles of a program, so that all end soonest when so many run at once."""

    def duration(num_chunks: int) -> int:
        return -(-rows * num_chunks // programs) * (-(-num_tiles // num_chunks) + SETUP_TILES)

    return -(-num_tiles // min(range(1, num_tiles + 1), key=duration))
