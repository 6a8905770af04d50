"""Selection by pairs of codes in Triton: two launches, of which one reads the codes, and no token gets a score.

A head here is one KV head of one lane. Its positions are cut into tiles, and these into chunks of adjacent ones.

1. `mark_chunk`, a program a chunk: the weight of every pair of codes, and by bisection the weight of the count-th best
   candidate, for it is known how many candidates have each pair. A pair is eligible if its weight is no less, and tied
   if it is the same. A byte a pair says so, in shared memory (4 KiB for 64 centroids), while the codes of the chunk
   pass by, two bytes a token. That leaves two bits a token, and how many of each kind a tile has.
   All chunks of a head weigh its pairs once more: on a device that is not full it takes no longer and saves a launch.
2. `write_taken`, a program some tiles: knows from the head's tiles which ties are too low, and the rank of each token.

Nothing is added atomically, so two runs agree. Traffic: the codes once, and an eighth of their bytes written and read.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from gpu_worker.policies.pqcache.pq_select.programs import mark_chunk, write_taken
from gpu_worker.policies.pqcache.pq_select.reference import LOG2_E, check_pairs

# Of 512 threads, two for each of the 132 SMs of an H200; more than enough for smaller devices.
PROGRAMS = 264
# Positions of a program at a time: 16 bytes of codes for each of 512 threads.
TILE = 4096
# Of the second launch, of 512 threads and few registers: four for each SM.
WRITERS = 528
# What to weigh all pairs takes, in tiles.
SETUP_TILES = 5


def pq_select(
    query: Tensor,
    codebooks: Tensor,
    codes: Tensor,
    pair_counts: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    counts: Tensor,
    width: int,
    num_positions: int,
    scale: float,
) -> Tensor:
    """See the reference. All tensors lie on one CUDA device; codebooks, codes and pair_counts may be views of one
    layer."""
    check_pairs(codebooks)
    batch, num_kv_heads = query.shape[0], codes.shape[1]
    ksub, dsub = codebooks.shape[-2:]
    padded_ksub = max(16, triton.next_power_of_2(ksub))
    # A table of 16384 pairs takes the registers of twice the threads.
    factor = 1 if padded_ksub <= 64 else 2
    tile, num_warps = TILE * factor, 16 * factor
    rows, num_tiles = batch * num_kv_heads, triton.cdiv(num_positions, tile)
    if rows * width * num_tiles == 0:
        return torch.full((batch, num_kv_heads, width), -1, device=query.device)
    taken = torch.empty(batch, num_kv_heads, width, dtype=torch.int64, device=query.device)
    marks = torch.empty(rows, num_tiles, tile // 8, dtype=torch.int16, device=query.device)
    tallies = torch.empty(rows, num_tiles, dtype=torch.int32, device=query.device)
    # The two codes of a token are one element.
    pairs = codes.view(torch.int16)
    spans = (begin.contiguous(), end.contiguous(), counts.contiguous())
    shape = (num_kv_heads, num_positions, width, num_tiles)
    num_chunks = _num_chunks(rows, num_tiles, PROGRAMS // factor)
    mark_chunk[(rows, num_chunks)](
        query.contiguous(), codebooks, pairs, pair_counts, seats.contiguous(), *spans, marks, tallies, *shape,
        scale * LOG2_E, query.shape[1] // num_kv_heads, ksub, dsub,
        *codebooks.stride()[:2], *pairs.stride()[:2], *pair_counts.stride()[:2],
        KSUB=padded_ksub, WIDTH=triton.next_power_of_2(dsub), TILE=tile,
        COUNT_BITS=count_bits(num_positions, padded_ksub**2),
        # Vectors of 8 tokens end within the codes of a head.
        ALIGN=8 if codes.shape[2] % 8 == 0 else 1, num_warps=num_warps, maxnreg=64,
    )  # fmt: skip
    # Of the longest sequence, so that it is compiled once.
    _write_marked(spans, marks, tallies, taken, num_positions, codes.shape[2], num_warps)
    return taken


def count_bits(num_positions: int, num_pairs: int) -> int:
    """Bits for a number of candidates that shares an integer with a number of pairs: one of 31 bits, or else of 63."""
    left = 31 - num_pairs.bit_length()
    return left if num_positions < 2**left else 32


def _write_marked(
    spans: tuple[Tensor, Tensor, Tensor],
    marks: Tensor,
    tallies: Tensor,
    taken: Tensor,
    num_positions: int,
    longest: int,
    num_warps: int,
) -> None:
    """Write the positions that the marks name to `taken`, int64 [B, H_kv, width], ascending, and -1 behind them.

    spans: begin, end, counts, int64 [B], contiguous. marks: int16 [B * H_kv, tiles, tile / 8]; tallies: int32
    [B * H_kv, tiles]; see `programs`. longest: no sequence has more positions; what is compiled depends on it.
    num_warps: of a program, best with a thread for 8 positions of a tile. All on one CUDA device.
    """
    _, num_kv_heads, width = taken.shape
    (rows, num_tiles), tile = tallies.shape, 8 * marks.shape[2]
    tiles = triton.cdiv(rows * num_tiles, WRITERS * 16 // num_warps)
    write_taken[(rows, triton.cdiv(num_tiles, tiles))](
        *spans, marks, tallies, taken, num_kv_heads, num_positions, width, num_tiles,
        TILES=triton.next_power_of_2(max(num_tiles, triton.cdiv(longest, tile))), TILE=tile, num_warps=num_warps,
    )  # fmt: skip


@cache
def _num_chunks(rows: int, num_tiles: int, programs: int) -> int:
    """Chunks of a head, so that all end soonest when so many programs run at once."""

    def duration(num_chunks: int) -> int:
        return -(-rows * num_chunks // programs) * (-(-num_tiles // num_chunks) + SETUP_TILES)

    return min(range(1, num_tiles + 1), key=duration)
