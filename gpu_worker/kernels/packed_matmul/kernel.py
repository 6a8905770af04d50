"""Products of few rows with a packed matrix, bound by reading the matrix once.

A program multiplies `OUTPUTS` rows of the matrix over a part of its columns. The matrix is the left operand: a product
of matrices takes eight columns, but 64 rows. Numbers are exact in 16 bits, so scales are applied to the sums. The last
program of a row's splits joins them, in the order of the columns: results repeat to the bit.
"""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.attention.kernel import is_interpreted, num_processors
from gpu_worker.kernels.packed_matmul.programs import multiply_split, unpack_tile
from gpu_worker.kernels.packed_matmul.reference import PackedMatrix

# Rows of the matrix that a program multiplies, and rows of the inputs.
OUTPUTS, LEAST_ROWS, MOST_ROWS = 64, 8, 64
# Least columns of a turn, and turns under way at a time: with many rows shared memory holds fewer.
STEP, STAGES, WIDE_STAGES, WIDE = 128, 4, 3, 32
NUM_WARPS = 4
# Programs that share a processor and all run at once.
PROGRAMS_PER_PROCESSOR, WIDE_PROGRAMS = 4, 2
MAX_SPLITS = 16
# Of `unpack_rows`: rows of the matrix for a program.
UNPACKED_ROWS = 32
KINDS = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8", torch.uint8: "nibbles"}


def packed_matmul(
    inputs: Tensor, matrix: PackedMatrix, bias: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    """See the reference."""
    num_rows, num_outputs = inputs.shape[0], matrix.num_rows
    out = torch.empty((num_rows, num_outputs), dtype=inputs.dtype, device=inputs.device)
    if num_rows == 0:
        return out
    assert inputs.stride(1) == 1, "rows are contiguous"
    assert onto is None or onto.stride(1) == 1, "rows are contiguous"
    rows = max(LEAST_ROWS, min(MOST_ROWS, triton.next_power_of_2(num_rows)))
    num_tiles, num_blocks = triton.cdiv(num_outputs, OUTPUTS), triton.cdiv(num_rows, rows)
    unroll = max(1, STEP // matrix.span)
    num_turns = triton.cdiv(matrix.num_steps, unroll)
    is_wide = rows > WIDE
    at_once = num_processors(inputs.device) * (WIDE_PROGRAMS if is_wide else PROGRAMS_PER_PROCESSOR)
    # splits are joined by tickets, one for each block of rows of a tile
    has_tickets = matrix.tickets.numel() >= num_tiles * num_blocks
    splits = num_splits(num_tiles * num_blocks, num_turns, at_once) if has_tickets else 1
    partials = torch.empty((splits, num_rows, num_outputs) if splits > 1 else (0,), device=inputs.device)
    codes = matrix.codes
    step_stride, row_stride = (matrix.span, codes.stride(0)) if codes.dim() == 2 else codes.stride()[:2]
    multiply_split[(num_tiles, splits, num_blocks)](
        inputs, inputs.stride(0), codes.view(torch.uint8) if codes.dim() == 2 else codes, step_stride, row_stride,
        matrix.scales, bias, onto, 0 if onto is None else onto.stride(0), out, partials,
        matrix.tickets, num_rows, matrix.num_columns, num_outputs, matrix.num_steps,
        triton.cdiv(num_turns, splits) * unroll,
        KIND=KINDS[codes.dtype], SPAN=matrix.span, UNROLL=unroll, GROUP_STEPS=group_steps(matrix),
        HAS_OFFSETS=matrix.has_offsets, ROWS=rows,
        OUTPUTS=OUTPUTS, IS_WHOLE=num_outputs % OUTPUTS == 0 and matrix.num_columns % (matrix.span * unroll) == 0,
        IS_SPLIT=splits > 1, STAGES=WIDE_STAGES if is_wide else STAGES,
        IS_PLAIN=is_interpreted(), num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def num_splits(num_tiles: int, num_turns: int, at_once: int) -> int:
    """Return the parts of the columns that separate programs multiply: so many that the programs fill the device."""
    wanted = max(1, at_once // num_tiles)
    parts = min(wanted, num_turns, MAX_SPLITS)
    # no part is empty
    return int(triton.cdiv(num_turns, triton.cdiv(num_turns, parts)))


def group_steps(matrix: PackedMatrix) -> int:
    """Return the steps that share a scale; 0 where sums are scaled at their end."""
    if matrix.scales.shape[0] == 1 and not matrix.has_offsets:
        return 0
    return int(triton.cdiv(matrix.group, matrix.span))


def unpack_rows(matrix: PackedMatrix, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """See the reference."""
    out = torch.empty((end - begin, matrix.num_columns), dtype=dtype, device=matrix.device)
    if end == begin:
        return out
    codes = matrix.codes
    step_stride, row_stride = (matrix.span, codes.stride(0)) if codes.dim() == 2 else codes.stride()[:2]
    unpack_tile[(triton.cdiv(end - begin, UNPACKED_ROWS), matrix.num_steps)](
        codes.view(torch.uint8) if codes.dim() == 2 else codes, step_stride, row_stride, matrix.scales, out,
        begin, end, matrix.num_columns, matrix.num_rows,
        KIND=KINDS[codes.dtype], SPAN=matrix.span, GROUP_STEPS=group_steps(matrix),
        HAS_OFFSETS=matrix.has_offsets, ROWS=UNPACKED_ROWS,
        IS_PLAIN=is_interpreted(), num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
