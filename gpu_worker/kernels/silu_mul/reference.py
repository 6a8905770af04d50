"""The definition of the gated MLP's middle, in PyTorch; it is also what a CPU runs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [T, 2m], gate then up, contiguous rows, only read; returns [T, m].

    In 16-bit types the kernel computes in float32 and rounds once: its result is this function's for a float32 copy,
    rounded. Here, where the copy would cost a CPU more than the product, SiLU is rounded too.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
