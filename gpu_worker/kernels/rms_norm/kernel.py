"""A program for each token: its row is read once and stays in registers between sum and norm.

Decode has few rows of 8 KiB, so the launch is what costs; the fusion saves two of three. A prefill chunk of 8192 rows
moves 4 rows each way a token, 256 MiB, bound by memory.
"""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(
    hidden,
    hidden_row,
    added,
    added_row,
    weight,
    eps,
    summed,
    normed,
    width,
    HAS_ADDED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    value = tl.load(hidden + row * hidden_row + column, mask=inside, other=0)
    if HAS_ADDED:
        more = tl.load(added + row * added_row + column, mask=inside, other=0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(hidden.dtype.element_ty)
        tl.store(summed + row * width + column, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    result = wide * scale * tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    tl.store(normed + row * width + column, result.to(hidden.dtype.element_ty), mask=inside)


def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    num_rows, width = hidden.shape
    normed = torch.empty((num_rows, width), dtype=hidden.dtype, device=hidden.device)
    summed = hidden if added is None else torch.empty_like(normed)
    if num_rows == 0:
        return summed, normed
    more = hidden if added is None else added
    assert hidden.stride(1) == more.stride(1) == weight.stride(0) == 1, "rows are contiguous"
    block = triton.next_power_of_2(width)
    _rms_norm[(num_rows,)](
        hidden,
        hidden.stride(0),
        more,
        more.stride(0),
        weight,
        eps,
        summed,
        normed,
        width,
        HAS_ADDED=added is not None,
        WIDTH=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return summed, normed
