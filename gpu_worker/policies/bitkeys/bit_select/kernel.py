"""Selection by keys at two bits a coordinate in Triton: three launches, of which one reads the codes.

1. `round_queries` and `weigh_codes` of `bit_score`: the level of every token's weight, seven bits of a byte, so that
   one operation compares four tokens.
2. `take_levels`, a program a chunk of a head: the level of the count-th best by bisection over the whole head, which
   stays in registers; then what is taken of the chunk, in order. All chunks of a head search once more, and so know
   what the others take: that saves two launches.

Nothing is added atomically, so two runs agree. Traffic: the codes and scales once, and a byte a token written, then
read from L2. Heads of more tokens than registers hold are scored and sorted out by `top_k`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.attention.kernel import is_interpreted
from gpu_worker.kernels.top_k.kernel import top_k
from gpu_worker.policies.bitkeys.bit_score.kernel import bit_score, weigh
from gpu_worker.policies.bitkeys.bit_score.reference import levels
from gpu_worker.policies.bitkeys.bit_select.programs import LANES, take_levels

# Tokens of a word.
WORD_TOKENS: int = LANES.value
# What the registers of an SM hold of a head.
MAX_WORDS = 32768
# Whole tiles of `weigh`.
LEAST_WORDS = 2048
# Words of a head for each thread up to which two programs share the registers of an SM; words that a thread takes from
# at a time then, and of longer heads. Numbers of tokens that are taken at a time are sums of 15 bits.
FEW_WORDS, STEP_WORDS, LONG_STEP_WORDS = 32, 4, 8
# Registers of a thread: where two programs share an SM's, and where one has them.
SHARED_REGISTERS, ALL_REGISTERS = 64, 128
WARP_THREADS, MOST_WARPS = 32, 16
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
    rows = batch * num_kv_heads
    if rows * width * num_positions == 0:
        return torch.full((batch, num_kv_heads, width), -1, device=query.device)
    num_words = max(LEAST_WORDS, triton.next_power_of_2(num_positions) // WORD_TOKENS)
    if num_words > MAX_WORDS:
        weights = bit_score(query, rotation, codes, scales, sinks, seats, begin, end, scale, num_positions)
        return top_k(levels(weights, counts, query.shape[1] // num_kv_heads), counts, width)
    found = torch.empty(rows, WORD_TOKENS * num_words, dtype=torch.int8, device=query.device)
    spans = (begin.contiguous(), end.contiguous(), counts.contiguous())
    weigh(query, rotation, codes, scales, sinks, (seats, *spans), scale, num_positions, found)
    taken = torch.empty(batch, num_kv_heads, width, dtype=torch.int64, device=query.device)
    num_warps = min(MOST_WARPS, num_words // (WARP_THREADS * FEW_WORDS))
    num_threads = WARP_THREADS * num_warps
    is_shared = num_words <= num_threads * FEW_WORDS
    step = num_threads * (STEP_WORDS if is_shared else LONG_STEP_WORDS)
    chunks = min(triton.cdiv(num_positions, WORD_TOKENS * step), max(1, PROGRAMS // rows))
    take_levels[(rows, chunks)](
        *spans, found.view(torch.int32), taken, num_kv_heads, num_positions, width,
        WORDS=num_words, STEP=step, IS_PLAIN=is_interpreted(),
        num_warps=num_warps, maxnreg=SHARED_REGISTERS if is_shared else ALL_REGISTERS,
    )  # fmt: skip
    return taken
