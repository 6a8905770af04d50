"""Norms, and the residual additions that are fused with some."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.kernels.rms_norm import add_normed, rms_norm
from gpu_worker.layers.block import Block, Part, Target


class Norm(Block):
    """A norm over rows of `width` elements. All norms of a layer are of one kind.

    name: its module's in the checkpoint.
    """

    tensors: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(self, name: str, width: int, eps: float, target: Target) -> None:
        super().__init__()
        self._name, self._width, self._eps = name, width, eps
        for kind in self.tensors:
            setattr(self, kind, target.empty(width))

    def parts(self) -> dict[str, Part]:
        return {f"{self._name}.{kind}": Part(kind, (self._width,)) for kind in self.tensors}

    def load(self, name: str, tensor: Tensor) -> None:
        self.get_parameter(name.rpartition(".")[2]).copy_(tensor)

    def fill(self, generator: torch.Generator) -> None:
        for kind in self.tensors:
            self.get_parameter(kind).fill_(1.0 if kind == "weight" else 0.0)

    @abstractmethod
    def normed(self, hidden: Tensor) -> Tensor:
        """Return hidden [T, W] normed."""

    def added(self, hidden: Tensor, output: Tensor) -> Tensor:
        """Return a new hidden + normed output."""
        return hidden + self.normed(output)

    def of_sum(self, hidden: Tensor, output: Tensor, output_norm: Self | None) -> tuple[Tensor, Tensor]:
        """Return a new hidden + output, of which the output is normed first where it has a norm, and the sum normed."""
        total = added(hidden, output, output_norm)
        return total, self.normed(total)


class RmsNorm(Norm):
    """RMSNorm, which is one launch with what is added before it."""

    weight: Tensor

    def normed(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self._eps)[1]

    def added(self, hidden: Tensor, output: Tensor) -> Tensor:
        return add_normed(hidden, output, self.weight, self._eps)

    def of_sum(self, hidden: Tensor, output: Tensor, output_norm: Self | None) -> tuple[Tensor, Tensor]:
        output_weight = None if output_norm is None else output_norm.weight
        return rms_norm(hidden, self.weight, self._eps, output, output_weight)


class ShiftedRmsNorm(RmsNorm):
    """RMSNorm whose checkpoint has the weight less 1. It is kept in float32, where adding 1 loses nothing."""

    def __init__(self, name: str, width: int, eps: float, target: Target) -> None:
        super().__init__(name, width, eps, target._replace(dtype=torch.float32))

    def load(self, name: str, tensor: Tensor) -> None:
        self.weight.copy_(1.0 + tensor.float())


class PlainLayerNorm(Norm):
    """LayerNorm without weights."""

    tensors = ()

    def normed(self, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden, (self._width,), eps=self._eps)


class ScaledLayerNorm(Norm):
    """LayerNorm with a weight and no bias."""

    weight: Tensor

    def normed(self, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden, (self._width,), self.weight, eps=self._eps)


class LayerNorm(ScaledLayerNorm):
    """LayerNorm with a weight and a bias."""

    tensors = ("weight", "bias")
    bias: Tensor

    def normed(self, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden, (self._width,), self.weight, self.bias, self._eps)


class ShiftedLayerNorm(LayerNorm):
    """LayerNorm whose checkpoint has the weight less 1; the sum is rounded as where the model was trained."""

    def load(self, name: str, tensor: Tensor) -> None:
        is_weight = name.endswith(".weight")
        super().load(name, tensor.to(self.weight.dtype) + 1.0 if is_weight else tensor)


def scaled(rows: Tensor, factor: float) -> Tensor:
    """Multiply rows that nothing else reads, in place; without a launch for a factor of 1."""
    return rows if factor == 1.0 else rows.mul_(factor)


def normed(hidden: Tensor, norm: Norm | None) -> Tensor:
    """Return hidden [T, W] normed; hidden itself without a norm."""
    return hidden if norm is None else norm.normed(hidden)


def added(hidden: Tensor, output: Tensor, output_norm: Norm | None) -> Tensor:
    """Return a new hidden + output, of which the output is normed first where it has a norm."""
    return hidden + output if output_norm is None else output_norm.added(hidden, output)


def added_and_normed(
    hidden: Tensor, output: Tensor, output_norm: Norm | None, norm: Norm | None
) -> tuple[Tensor, Tensor]:
    """Return `added`, and its `normed`: one launch where the kind of norm allows it."""
    if norm is None:
        total = added(hidden, output, output_norm)
        return total, total
    return norm.of_sum(hidden, output, output_norm)
