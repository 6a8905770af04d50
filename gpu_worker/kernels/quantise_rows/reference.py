"""The definition of rows as e4m3 numbers, in PyTorch; it is also what a CPU runs."""

from __future__ import annotations

import torch
from torch import Tensor

# The largest number of e4m3.
MOST = 448.0
# Of a row of zeros, which any scale is right for.
LEAST_SCALE = 1e-12


def quantise_rows(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes float8_e4m3fn [T, K] and scales float32 [T, 1] such that codes * scales are the inputs [T, K],
    rounded to the nearest number.

    inputs: a float type, contiguous rows. The largest number of a row becomes 448.
    """
    wide = inputs.float()
    scales = (wide.abs().amax(dim=1, keepdim=True) / MOST).clamp_(min=LEAST_SCALE)
    return (wide / scales).clamp_(-MOST, MOST).to(torch.float8_e4m3fn), scales
