"""A program for each token: its hidden state is read once and stays in registers between sum and norms.

Decode has few tokens of 8 KiB, so the launch is what costs; the fusion saves two of three. A prefill chunk of 8192
tokens moves 256 MiB and is bound by memory.
"""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    added: Tensor | None = None,
    added_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    normed = _new_rows(hidden)
    summed = hidden if added is None else _new_rows(hidden)
    _launch(hidden, eps, added, added_weight, summed, weight, normed)
    return summed, normed


def add_normed(hidden: Tensor, added: Tensor, added_weight: Tensor, eps: float) -> Tensor:
    """See the reference."""
    summed = _new_rows(hidden)
    _launch(hidden, eps, added, added_weight, summed, None, None)
    return summed


def _new_rows(hidden: Tensor) -> Tensor:
    return torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)


def _launch(
    hidden: Tensor,
    eps: float,
    added: Tensor | None,
    added_weight: Tensor | None,
    summed: Tensor,
    weight: Tensor | None,
    normed: Tensor | None,
) -> None:
    num_rows, width = hidden.shape
    if num_rows == 0:
        return
    added_row = 0 if added is None else added.stride(0)
    assert hidden.stride(1) == 1, "rows are contiguous"
    assert added is None or added.stride(1) == 1, "rows are contiguous"
    block = triton.next_power_of_2(width)
    _rms_norm[(num_rows,)](
        hidden, hidden.stride(0), added, added_row, added_weight, weight, eps, summed, normed, width,
        WIDTH=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip


@triton.jit
def _rms_norm(
    hidden, hidden_row, added, added_row, added_weight, weight, eps, summed, normed, width,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One row. added, added_weight, normed with its weight: None where there is none."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    value = tl.load(hidden + row * hidden_row + column, mask=inside, other=0)
    if added is not None:
        more = tl.load(added + row * added_row + column, mask=inside, other=0)
        if added_weight is not None:
            more = _normed(more, added_weight, column, inside, eps, width)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(hidden.dtype.element_ty)
        tl.store(summed + row * width + column, value, mask=inside)
    if normed is not None:
        tl.store(
            normed + row * width + column, _normed(value, weight, column, inside, eps, width), mask=inside
        )


@triton.jit
def _normed(value, weight, column, inside, eps, width):
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    result = wide * scale * tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    return result.to(value.dtype)
