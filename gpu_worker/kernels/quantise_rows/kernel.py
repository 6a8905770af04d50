"""A program for each row, which is read once and stays in registers between its largest number and its codes."""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.quantise_rows import reference

MOST, LEAST_SCALE = tl.constexpr(reference.MOST), tl.constexpr(reference.LEAST_SCALE)


def quantise_rows(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference."""
    num_rows, width = inputs.shape
    codes = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=inputs.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=inputs.device)
    if num_rows:
        assert inputs.stride(1) == 1, "rows are contiguous"
        block = triton.next_power_of_2(width)
        _quantise_row[(num_rows,)](
            inputs, inputs.stride(0), codes, scales, width, WIDTH=block, num_warps=min(16, max(1, block // 512))
        )  # fmt: skip
    return codes, scales


@triton.jit
def _quantise_row(inputs, input_row, codes, scales, width, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    value = tl.load(inputs + row * input_row + column, mask=inside, other=0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / MOST, LEAST_SCALE)
    code = tl.minimum(tl.maximum(value / scale, -MOST), MOST)
    tl.store(codes + row * width + column, code.to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, scale)
