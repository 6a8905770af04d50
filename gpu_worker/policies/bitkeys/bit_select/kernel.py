"""Selection by keys at two bits a coordinate in Triton: four launches, of which one reads the codes.

1. `round_queries` and `weigh_codes` of `bit_score`: the level of every token's weight, fourteen bits in two planes of
   seven, so that one operation compares four tokens.
2. `mark_levels`, a program a chunk of a head: the level of the count-th best by bisection, first of the high bits of
   the whole head, which stay in registers, then of the low bits where the high ones are that level's; marks of its
   chunk, two bits a token. All chunks of a head search once more, which saves a launch.
3. `write_taken` of `kernels.marks`.

Nothing is added atomically, so two runs agree. Traffic: the codes and scales once, two bytes a token written and read,
the second time from L2. Heads of more tokens than registers hold are scored and sorted out by `top_k`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.marks.kernel import write_marked
from gpu_worker.kernels.top_k.kernel import top_k
from gpu_worker.policies.bitkeys.bit_score.kernel import bit_score, padded_positions, weigh
from gpu_worker.policies.bitkeys.bit_score.reference import levels
from gpu_worker.policies.bitkeys.bit_select.programs import mark_levels

# Positions whose marks are one tile: 8 for each of 512 threads.
TILE = 4096
# Of four tokens each: what the registers of an SM hold of a head.
MAX_WORDS = 32768
# What 512 threads hold, in registers for two programs an SM.
FEW_WORDS = 8192
# SMs of an H200; more than enough for smaller devices.
PROGRAMS = 132


def bit_select(
    query: Tensor,
    rotation: Tensor,
    codes: Tensor,
    scales: Tensor,
    sinks: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    counts: Tensor,
    width: int,
    num_positions: int,
    scale: float,
) -> Tensor:
    """See the reference. All on one CUDA device; codes, scales and sinks may be views of one layer."""
    batch, num_kv_heads = query.shape[0], codes.shape[1]
    rows, num_tiles = batch * num_kv_heads, triton.cdiv(num_positions, TILE)
    if rows * width * num_tiles == 0:
        return torch.full((batch, num_kv_heads, width), -1, device=query.device)
    padded = padded_positions(num_positions, query.shape[1] // num_kv_heads)
    num_words = max(1024, triton.next_power_of_2(padded // 4))
    if num_words > MAX_WORDS:
        weights = bit_score(query, rotation, codes, scales, sinks, seats, begin, end, scale, num_positions)
        return top_k(levels(weights), counts, width)
    planes = torch.empty(rows, 2, padded, dtype=torch.int8, device=query.device)
    weigh(query, rotation, codes, scales, sinks, (seats, begin, end), scale, num_positions, planes)
    taken = torch.empty(batch, num_kv_heads, width, dtype=torch.int64, device=query.device)
    marks = torch.empty(rows, num_tiles, TILE // 8, dtype=torch.int16, device=query.device)
    tallies = torch.empty(rows, num_tiles, dtype=torch.int32, device=query.device)
    spans = (begin.contiguous(), end.contiguous(), counts.contiguous())
    num_warps = 16 if num_words <= FEW_WORDS else 32
    mark_levels[(rows, min(num_tiles, max(1, PROGRAMS // rows)))](
        *spans, planes, planes.view(torch.int32), marks, tallies,
        num_kv_heads, num_positions, width, num_tiles, padded,
        WORDS=num_words, TILE=TILE, num_warps=num_warps, maxnreg=64,
    )  # fmt: skip
    # Of the longest sequence, so that it is compiled once.
    write_marked(spans, marks, tallies, taken, num_positions, codes.shape[2])
    return taken
