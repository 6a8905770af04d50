"""Selection by score in Triton: three launches, of which two read the scores.

A head here has the N scores of one KV head of a lane. Its positions modulo TILE are its columns; TILE is at least
twice `width`.

1. `column_maxima`: the best score of each column. The count-th best of them is a floor: that many scores reach it,
   and where scores do not follow columns, at most some 1.6 times as many do.
2. `prune`: a program a chunk of a head lists the positions above the floor, in order, and counts those at it. All
   lists of a head, chunk after chunk as these come, also make its short list, of one tile.
3. `finish`: a program a chunk finds the threshold among the head's short list, each for itself, counts what is taken
   of the chunks before it and writes what is taken of its own. If fewer than asked for lie above the floor, the floor
   is the threshold. If more than a tile do, one program a head prunes their list and writes.

A head that fits one tile needs a launch of its own only. Grids have about two programs an SM for one head as for
hundreds: the fewer heads, the narrower the strips of columns and the more chunks. The order of chunks in a short list
is the only thing that may differ between two runs, and what is taken does not depend on it.
Traffic: the scores twice (the second time mostly from L2), and 4 bytes of scratch a score, of which few are touched.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.best_rows.kernel import search_by_digits
from gpu_worker.kernels.top_k.finish import finish
from gpu_worker.kernels.top_k.programs import NUM_NOTES, column_maxima, prune, select_in_tile

# Two for each of the 132 SMs of an H200; more than enough for smaller devices.
PROGRAMS = 264
MAX_CHUNKS = 64
MAX_WIDTH = 8192


def top_k(scores: Tensor, counts: Tensor, width: int | None = None) -> Tensor:
    """See the reference. All on one CUDA device; scores may have any strides, and no count is above `width`.
    -0.0 and 0.0 tie, and NaN is never taken.

    Without `width` it cannot be captured. Above 8192, for which a program has no registers, `search_by_digits` selects.
    Raises ValueError for scores of another dtype.
    """
    if scores.dtype != torch.float32:
        raise ValueError(f"top_k: scores are {scores.dtype}, not float32")
    if width is None:
        width = int(counts.max()) if counts.numel() else 0
    batch, num_heads, num_positions = scores.shape
    rows = batch * num_heads
    if rows == 0 or width == 0 or num_positions == 0:
        return torch.full((batch, num_heads, width), -1, device=scores.device)
    if width > MAX_WIDTH:
        of_heads = counts[:, None].expand(-1, num_heads).flatten()
        return search_by_digits(scores.flatten(0, 1), of_heads, width).unflatten(0, (batch, num_heads))
    if scores.stride(-1) != 1:
        scores = scores.contiguous()
    taken = torch.empty(batch, num_heads, width, dtype=torch.int64, device=scores.device)
    bits, counts = scores.view(torch.int32), counts.contiguous()
    row_shape = (num_heads, num_positions, width, bits.stride(0), bits.stride(1))
    tile = max(2048, 2 * triton.next_power_of_2(width))
    # Sixteen scores a thread: what each thread does on its own in a round of the search costs more than its share.
    num_warps = min(tile // 512, 32)
    build = {"TILE": tile, "num_warps": num_warps, "maxnreg": min(128, 2048 // num_warps)}
    if num_positions <= tile:
        select_in_tile[(rows,)](bits, counts, taken, *row_shape, **build)
        return taken
    strip = min(max(triton.next_power_of_2(rows * tile // PROGRAMS + 1) // 2, 32), 512)
    chunk_tiles = _chunk_tiles(rows, triton.cdiv(num_positions, tile))
    num_chunks = triton.cdiv(num_positions, chunk_tiles * tile)

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=scores.device)

    maxima, notes = scratch(rows, tile), scratch(rows, NUM_NOTES.value)
    by_chunk = [scratch(rows, num_chunks) for _ in range(3)]
    lists = (notes, *by_chunk, scratch(rows, num_positions), scratch(rows, tile), scratch(rows, tile))
    chunking = (num_chunks, chunk_tiles * tile)
    # Twice what a chunk lists if all list as much.
    build["SLAB"] = min(tile, max(512, triton.next_power_of_2(3 * width // num_chunks)))
    column_maxima[(rows, tile // strip)](
        bits, maxima, notes, *row_shape, TILE=tile, STRIP=strip, DEPTH=4096 // strip, num_warps=8
    )
    grid = (rows, num_chunks)
    prune[grid](bits, counts, maxima, *lists, *row_shape, *chunking, IS_ONE_TILE=chunk_tiles == 1, **build)
    finish[grid](
        bits, counts, *lists, taken, *row_shape, *chunking, CHUNKS=triton.next_power_of_2(num_chunks), **build
    )
    return taken


@cache
def _chunk_tiles(rows: int, num_tiles: int) -> int:
    """Tiles of a chunk, so that the programs that run at once end soonest: finding the floor costs some three tiles."""

    def duration(num_chunks: int) -> int:
        return triton.cdiv(rows * num_chunks, PROGRAMS) * (triton.cdiv(num_tiles, num_chunks) + 3)

    return triton.cdiv(num_tiles, min(range(1, min(num_tiles, MAX_CHUNKS) + 1), key=duration))
