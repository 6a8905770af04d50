"""Pieces joined in one launch: every output is read once and the sum written once, bound by memory.

A program has some rows of one (token, head) each. Eight pieces of 8,192 queries of 32 heads are 512 MiB.
"""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a program's tile.
TILE = 2048


def join_pieces(log_sums: Tensor, *outputs: Tensor) -> Tensor:
    """See the reference. Outputs that are not contiguous are copied first."""
    num_tokens, num_heads, head_dim = outputs[0].shape
    joined = torch.empty(outputs[0].shape, dtype=outputs[0].dtype, device=log_sums.device)
    if joined.numel():
        width = triton.next_power_of_2(head_dim)
        rows = max(1, TILE // width)
        _join_pieces[(triton.cdiv(num_tokens * num_heads, rows),)](
            log_sums.contiguous(), tuple(output.contiguous() for output in outputs), joined, num_tokens, num_heads,
            HEAD_DIM=head_dim, WIDTH=width, ROWS=rows, num_warps=4,
        )  # fmt: skip
    return joined


@triton.jit(do_not_specialize=["num_tokens"])
def _join_pieces(
    log_sums, outputs, joined, num_tokens, num_heads,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    num_rows = num_tokens * num_heads
    is_row = row < num_rows
    log_sums += row % num_heads * num_tokens + row // num_heads
    most = tl.full([ROWS], float("-inf"), tl.float32)
    for piece in tl.static_range(len(outputs)):
        most = tl.maximum(most, tl.load(log_sums + piece * num_rows, mask=is_row, other=0.0))
    dims = tl.arange(0, WIDTH)[None, :]
    places = row.to(tl.int64)[:, None] * HEAD_DIM + dims
    inside = is_row[:, None] & (dims < HEAD_DIM)
    summed = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for piece in tl.static_range(len(outputs)):
        weight = tl.exp(tl.load(log_sums + piece * num_rows, mask=is_row, other=0.0) - most)
        output = tl.load(outputs[piece] + places, mask=inside, other=0.0).to(tl.float32)
        summed += weight[:, None] * output
        total += weight
    tl.store(joined + places, (summed / total[:, None]).to(joined.dtype.element_ty), mask=inside)
