"""Soft matching in Triton: a round is four launches, and none of them waits for the host.

1. Zeros for the histogram. 2. `match_chunk`, grid (chunks, H): cosines of a chunk's rows in one tile of products; each
seeking row leaves its best edge as one number, and counts it in the head's histogram of 8193 levels. 3. `choose_edges`,
grid (H): the level at which the wanted number of edges is reached, and by prefix sums over chunks how many of the ties
each chunk leaves out and where its survivors go. 4. `merge_chunk`, grid (chunks, tiles of d, H): survivors are copied
in order, and partners become means, by a product with a matrix of zeros and ones.

Rows are read twice and written once; in addition a round takes 4 bytes an edge and 32 KiB a head. The histogram's
atomic sums are of whole numbers: two runs agree. Chunks above 256 rows, and so all rows as one chunk, go to the
reference, which waits for the host once a round.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.attention.kernel import is_interpreted
from gpu_worker.policies.chelsea.soft_matching import reference
from gpu_worker.policies.chelsea.soft_matching.programs import (
    LEVELS,
    NO_COSINE,
    PLACES,
    choose_edges,
    match_chunk,
    merge_chunk,
)
from gpu_worker.policies.chelsea.soft_matching.reference import (
    STEPS,
    Matches,
    WeightedRows,
    check_merged,
    num_matches,
)

# A tile of products is one half of a chunk by the other.
MAX_CHUNK = 256
# Dimensions that a step of matching has of either half, of 16-bit rows and of float32 rows.
NARROW_DIMS = 64
WIDE_DIMS = 16
# Dimensions of a row that a program merges, of keys and then of values.
MERGED_DIMS = 64
# Edges that choosing has in registers.
CHOSEN_TILE = 8192
# Warps of a program; half of them where a chunk has half of the rows, or fewer.
MATCH_WARPS = 8
CHOOSE_WARPS = 16
MERGE_WARPS = 8
# Registers of a thread, so that two programs of 256 threads share an SM.
MATCH_REGISTERS = 128
MERGE_REGISTERS = 128
# Nothing is loaded ahead: with so few registers, 8 warps and loads ahead, Triton 3.6 read 16-bit tiles on Hopper before
# they were there (17 of 100 edges were wrong, others in every run).
STAGES = 1


def match_rows(keys: Tensor, chunk: int, max_similarities: int = reference.MAX_SIMILARITIES) -> Matches:
    """See the reference. Keys lie on a CUDA device, with a last stride of 1."""
    if chunk > MAX_CHUNK:
        return reference.match_rows(keys, chunk, max_similarities)
    edges, _ = _matched(keys, chunk)
    places = torch.arange(edges.shape[1], device=keys.device)
    each = (chunk + 1) // 2
    begin, place = places // each * chunk, places % each
    partner = begin + 2 * (PLACES.value - 1 - edges % PLACES.value) + 1
    similarity = (edges // PLACES.value - NO_COSINE.value).float() / STEPS
    return Matches(begin + 2 * place, partner, similarity)


def merge_rows(
    rows: WeightedRows, chunk: int, num_merged: int, dtype: torch.dtype = torch.float32
) -> WeightedRows:
    """See the reference. All on one CUDA device, with last strides of 1."""
    if chunk > MAX_CHUNK:
        return reference.merge_rows(rows, chunk, num_merged, dtype)
    num_heads, num_rows, width = rows.keys.shape
    check_merged(num_rows, chunk, num_merged)
    num_left, device = num_rows - num_merged, rows.device
    merged = WeightedRows(
        torch.empty(num_heads, num_left, dtype=torch.int64, device=device),
        torch.empty(num_heads, num_left, dtype=torch.float32, device=device),
        torch.empty(num_heads, num_left, width, dtype=dtype, device=device),
        torch.empty(num_heads, num_left, width, dtype=dtype, device=device),
    )
    if not merged.keys.numel():
        return merged
    edges, histogram = _matched(rows.keys, chunk)
    each, num_chunks = (chunk + 1) // 2, triton.cdiv(num_rows, chunk)
    thresholds = torch.empty(num_heads, dtype=torch.int32, device=device)
    skipped = torch.empty(num_heads, num_chunks, dtype=torch.int32, device=device)
    removed = torch.empty(num_heads, num_chunks, dtype=torch.int32, device=device)
    step = min(32, triton.next_power_of_2(each))
    choose_edges[(num_heads,)](
        edges,
        histogram,
        thresholds,
        skipped,
        removed,
        edges.shape[1],
        num_chunks,
        num_merged,
        EACH=each,
        CHUNKS=CHOSEN_TILE // step,
        STEP=step,
        num_warps=CHOOSE_WARPS,
    )
    dims = max(16, min(MERGED_DIMS, triton.next_power_of_2(width)))
    half = _half(chunk)
    merge_chunk[(num_chunks, 2 * triton.cdiv(width, dims), num_heads)](
        rows.positions,
        rows.degrees,
        rows.keys,
        rows.values,
        edges,
        thresholds,
        skipped,
        removed,
        merged.positions,
        merged.degrees,
        merged.keys,
        merged.values,
        rows.positions.stride(0),
        rows.degrees.stride(0),
        *rows.keys.stride()[:2],
        *rows.values.stride()[:2],
        num_rows,
        edges.shape[1],
        num_left,
        width,
        CHUNK=chunk,
        HALF=half,
        DIMS=dims,
        WIDE_DOT=is_interpreted(),
        maxnreg=MERGE_REGISTERS,
        num_stages=STAGES,
        num_warps=MERGE_WARPS if half == MAX_CHUNK // 2 else MERGE_WARPS // 2,
    )
    return merged


def _matched(keys: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The best edge of each seeking row, int32 [H, A], and how many have each level, int32 [H, LEVELS]."""
    num_heads, num_rows, width = keys.shape
    num_edges = num_matches(num_rows, chunk)
    edges = torch.empty(num_heads, num_edges, dtype=torch.int32, device=keys.device)
    histogram = torch.zeros(num_heads, LEVELS.value, dtype=torch.int32, device=keys.device)
    if edges.numel():
        half = _half(chunk)
        match_chunk[(triton.cdiv(num_rows, chunk), num_heads)](
            keys,
            edges,
            histogram,
            *keys.stride()[:2],
            num_rows,
            num_edges,
            width,
            CHUNK=chunk,
            HALF=half,
            DIMS=WIDE_DIMS if keys.dtype == torch.float32 else NARROW_DIMS,
            WIDE_DOT=is_interpreted(),
            maxnreg=MATCH_REGISTERS,
            num_stages=STAGES,
            num_warps=MATCH_WARPS if half == MAX_CHUNK // 2 else MATCH_WARPS // 2,
        )
    return edges, histogram


def _half(chunk: int) -> int:
    """Rows of one half of a chunk, as many as a tile has."""
    return int(max(16, triton.next_power_of_2((chunk + 1) // 2)))
