"""The definition of the gated MLP's middle, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up in float32, rounded once. gate_up: [T, 2m], gate then up, contiguous rows; returns [T, m]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
