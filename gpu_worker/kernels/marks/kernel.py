"""The launch of `write_taken`; nothing is added atomically, so two runs agree."""

from __future__ import annotations

import triton
from torch import Tensor

from gpu_worker.kernels.marks.programs import write_taken

# Of 512 threads and few registers, four for each of the 132 SMs of an H200; more than enough for smaller devices.
WRITERS = 528


def write_marked(
    spans: tuple[Tensor, Tensor, Tensor],
    marks: Tensor,
    tallies: Tensor,
    taken: Tensor,
    num_positions: int,
    longest: int,
    num_warps: int = 16,
) -> None:
    """Write the positions that the marks name to `taken`, int64 [B, H_kv, width], ascending, and -1 behind them.

    spans: begin, end, counts, int64 [B], contiguous. marks: int16 [B * H_kv, tiles, tile / 8]; tallies: int32
    [B * H_kv, tiles]; as `programs` has them. longest: no sequence
    has more positions; what is compiled depends on it. num_warps: of a program, best with a thread for 8 positions of a
    tile. All on one CUDA device.
    """
    _, num_kv_heads, width = taken.shape
    (rows, num_tiles), tile = tallies.shape, 8 * marks.shape[2]
    tiles = triton.cdiv(rows * num_tiles, WRITERS * 16 // num_warps)
    write_taken[(rows, triton.cdiv(num_tiles, tiles))](
        *spans, marks, tallies, taken, num_kv_heads, num_positions, width, num_tiles,
        TILES=triton.next_power_of_2(max(num_tiles, triton.cdiv(longest, tile))), TILE=tile, num_warps=num_warps,
    )  # fmt: skip
