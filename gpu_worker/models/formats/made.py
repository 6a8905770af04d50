"""Formats of plain matrices that are quantised while they are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.kernels.quantise_rows.reference import quantise_rows
from gpu_worker.layers import PLAIN, Holding, Matrix, Numbers, Part, StoredMatrix, Target, WeightFormat
from gpu_worker.layers.packed import hold

# Rows that are quantised at a time, as float32.
_ROWS = 1024
_GROUP = 128


class Made(WeightFormat):
    """Stored as plain numbers."""

    def parts(self, name: str, shape: tuple[int, int]) -> dict[str, Part]:
        return PLAIN.parts(name, shape)

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], device: torch.device
    ) -> StoredMatrix:
        weight = tensors["weight"].to(device)
        parts = [self.quantise(rows.float()) for rows in weight.split(_ROWS)]
        codes, scales = (torch.cat([part[place] for part in parts]) for place in (0, 1))
        return StoredMatrix(codes, scales, group=0 if scales.shape[1] == 1 else _GROUP)

    @abstractmethod
    def quantise(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers of rows float32 [R, K] and their scales [R, G]."""


@dataclass(frozen=True)
class MadeFp8(Made):
    """E4M3 numbers with a scale for each row."""

    quantization = "fp8"

    def quantise(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return quantise_rows(rows)

    def matrix(self, num_rows: int, num_columns: int, target: Target) -> Matrix:
        return hold((Holding(Numbers.E4M3),), (num_rows, num_columns), target)


@dataclass(frozen=True)
class MadeInt4(Made):
    """The nearest of 16 numbers in groups of 128 columns, which no data were consulted for: for measuring speed."""

    quantization = "int4"

    def quantise(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        num_columns = rows.shape[1]
        groups = torch.nn.functional.pad(rows, (0, -num_columns % _GROUP)).unflatten(1, (-1, _GROUP))
        largest = torch.maximum(groups.amax(2) / 7, -groups.amin(2) / 8).clamp_(min=1e-7)
        scales = largest.half().float()
        numbers = (groups / scales[:, :, None]).round_().clamp_(-8, 7).to(torch.int8)
        return numbers.flatten(1)[:, :num_columns], scales

    def matrix(self, num_rows: int, num_columns: int, target: Target) -> Matrix:
        group = _GROUP if num_columns > _GROUP else 0
        holding = Holding(Numbers.INT4, group)
        return hold((holding,), (num_rows, num_columns), target)
