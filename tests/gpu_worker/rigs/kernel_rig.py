"""Inputs that show what a kernel may not read, and how far its results may be from exact ones."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def amid_nan(rows: Tensor, beside: int = 3) -> Tensor:
    """The last two dimensions as a view of a wider tensor that is NaN everywhere else."""
    return F.pad(rows, (0, beside, 1, 2), value=math.nan)[..., 1:-2, : rows.shape[-1]]


def assert_rounded(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """`found` is the float32 `exact`, rounded once to its type. (Triton's interpreter cuts off where a GPU rounds.)"""
    assert (found.dtype, found.shape) == (dtype, exact.shape)
    rtol = max(torch.finfo(dtype).eps, 2e-6)
    torch.testing.assert_close(found.float(), exact, atol=2e-6, rtol=rtol)
