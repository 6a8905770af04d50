"""Matrices of 8-bit floats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from gpu_worker.errors import ModelError
from gpu_worker.layers import Holding, Matrix, Numbers, Part, StoredMatrix, Target, WeightFormat
from gpu_worker.layers.block import FLOATS
from gpu_worker.layers.packed import hold

E4M3 = "F8_E4M3"
# Scales are plain floats, or powers of two that are stored as their exponents.
SCALES = (*FLOATS, "F8_E8M0")


class Granularity(Enum):
    """Numbers that share a scale."""

    TENSOR = auto()
    ROW = auto()
    BLOCK = auto()


@dataclass(frozen=True)
class Fp8(WeightFormat):
    """E4M3 numbers times their scales.

    scale: the tensor of scales, after the module's name.
    granularity, num_dims: what shares a scale, and dimensions of the tensor of scales.
    block: rows and columns of a block.
    """

    scale: str
    granularity: Granularity
    num_dims: int
    block: tuple[int, int] = (0, 0)
    quantization = "fp8"

    def parts(self, name: str, shape: tuple[int, int]) -> dict[str, Part]:
        scales = Part("scales", self._scale_shape(shape), SCALES)
        return {f"{name}.weight": Part("codes", shape, (E4M3,)), f"{name}.{self.scale}": scales}

    def _scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        if self.granularity is Granularity.TENSOR:
            return (1,) * self.num_dims
        if self.granularity is Granularity.ROW:
            return (shape[0], 1)[: self.num_dims]
        rows, columns = self.block
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], device: torch.device
    ) -> StoredMatrix:
        codes, scales = tensors["codes"].to(device), tensors["scales"].to(device).float()
        if ((codes.view(torch.uint8) & 0x7F) == 0x7F).any():
            raise ModelError("an 8-bit weight is not a number; download the weights again")
        if self.granularity is not Granularity.BLOCK:
            return StoredMatrix(codes, scales.reshape(-1, 1).expand(shape[0], 1))
        rows, columns = self.block
        return StoredMatrix(codes, scales.repeat_interleave(rows, dim=0)[: shape[0]], group=columns)

    @property
    def holding(self) -> Holding:
        return Holding(Numbers.E4M3, self.block[1])

    def matrix(self, num_rows: int, num_columns: int, target: Target) -> Matrix:
        return hold((self.holding,), (num_rows, num_columns), target)
