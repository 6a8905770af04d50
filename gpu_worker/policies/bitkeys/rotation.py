"""A fixed rotation that spreads what a few channels carry over all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """matrix: bfloat16 [d, d], orthogonal but for rounding; a vector x becomes matrix @ x, and inner products stay as
    they were."""

    matrix: Tensor

    @classmethod
    def of(cls, head_dim: int, device: torch.device) -> Rotation:
        """The rotation of a head size, always the same: a Hadamard matrix whose columns have random signs where the
        size is a power of two, else what the QR decomposition leaves of random normal numbers."""
        generator = torch.Generator().manual_seed(head_dim)
        if head_dim & (head_dim - 1) == 0:
            signs = torch.randint(0, 2, (head_dim,), generator=generator) * 2 - 1
            matrix = _hadamard(head_dim) * (signs / math.sqrt(head_dim))
        else:
            matrix = torch.linalg.qr(
                torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64)
            )[0]
        return cls(matrix.to(torch.bfloat16).contiguous().to(device))


def _hadamard(size: int) -> Tensor:
    """Sylvester's matrix of a power of two: float32 [size, size], of ones and minus ones."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        above = torch.cat([matrix, matrix], dim=1)
        matrix = torch.cat([above, torch.cat([matrix, -matrix], dim=1)])
    return matrix
