"""RMSNorm, and the residual additions that are fused with it."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.kernels.rms_norm import add_normed, rms_norm
from gpu_worker.layers.block import Target, Whole


class Norm(Whole):
    """The weight of an RMSNorm over `width` elements.

    name: its module's in the checkpoint.
    """

    def __init__(self, name: str, width: int, target: Target) -> None:
        super().__init__(f"{name}.weight", (width,), target)

    def fill(self, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)


def scaled(rows: Tensor, factor: float) -> Tensor:
    """Multiply rows that nothing else reads, in place; without a launch for a factor of 1."""
    return rows if factor == 1.0 else rows.mul_(factor)


def normed(hidden: Tensor, norm: Norm | None, eps: float) -> Tensor:
    """Return hidden [T, W] normed; hidden itself without a norm."""
    return hidden if norm is None else rms_norm(hidden, norm.weight, eps)[1]


def added(hidden: Tensor, output: Tensor, output_norm: Norm | None, eps: float) -> Tensor:
    """Return a new hidden + output, of which the output is normed first where it has a norm."""
    return hidden + output if output_norm is None else add_normed(hidden, output, output_norm.weight, eps)


def added_and_normed(
    hidden: Tensor, output: Tensor, output_norm: Norm | None, norm: Norm | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `added`, and its `normed`: one launch where there is a norm."""
    if norm is None:
        total = added(hidden, output, output_norm, eps)
        return total, total
    return rms_norm(hidden, norm.weight, eps, output, None if output_norm is None else output_norm.weight)
