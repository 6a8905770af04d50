"""Formats of a matrix: how a checkpoint stores it, and what a device holds and multiplies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.errors import ModelError
from gpu_worker.layers.block import Part, Target, fill_random


class Piece(NamedTuple):
    """The region `rows`, `columns` of a checkpoint's matrix, which fills a rank's matrix from `row` on."""

    rows: slice
    columns: slice
    row: int

    @property
    def target(self) -> slice:
        """Rows of the rank's matrix."""
        return slice(self.row, self.row + self.rows.stop - self.rows.start)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A checkpoint's matrix [N, K]: value[n, k] = codes[n, k] * scales[n, k // group] + offsets[n, k // group].

    codes: [N, K] of any type of numbers; in 4 bits uint8 ones, from 0 to 15, are held 8 lower with other offsets.
    scales, offsets: float [N, ceil(K / group)], or None.
    group: columns that share a scale; 0 for all.
    order: int64 [K], the input that each column of the codes multiplies; None where that is the column itself.
    """

    codes: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None
    group: int = 0
    order: Tensor | None = None

    def rows(self, rows: slice) -> StoredMatrix:
        scales, offsets = (each if each is None else each[rows] for each in (self.scales, self.offsets))
        return replace(self, codes=self.codes[rows], scales=scales, offsets=offsets)

    def columns(self, columns: slice) -> StoredMatrix:
        """Raises ModelError where the columns are not whole groups, or not those of consecutive inputs."""
        num_columns = self.codes.shape[1]
        if columns == slice(0, num_columns):
            return self
        group = self.group or num_columns
        is_whole = columns.start % group == 0 and (columns.stop % group == 0 or columns.stop == num_columns)
        if self.order is not None or (self.group and not is_whole):
            raise ModelError(
                f"quantised inputs {columns.start} to {columns.stop} in groups of {group} cannot be divided among "
                "ranks: use fewer ranks"
            )
        groups = slice(columns.start // group, -(-columns.stop // group)) if self.group else slice(None)
        scales, offsets = (each if each is None else each[:, groups] for each in (self.scales, self.offsets))
        return replace(self, codes=self.codes[:, columns], scales=scales, offsets=offsets)

    def values(self) -> Tensor:
        """Return the values [N, K], computed in float32; unscaled codes as they are."""
        values = self.codes
        if self.scales is not None:
            values = values.float() * self._spread(self.scales)
        if self.offsets is not None:
            values = values + self._spread(self.offsets)
        if self.order is None:
            return values
        found = torch.empty_like(values)
        found[:, self.order] = values
        return found

    def _spread(self, per_group: Tensor) -> Tensor:
        num_columns = self.codes.shape[1]
        return per_group.float().repeat_interleave(self.group or num_columns, dim=1)[:, :num_columns]


class Numbers(Enum):
    """Kinds of numbers that kernels read. std: of random ones."""

    E4M3 = "e4m3"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def std(self) -> float:
        return {"e4m3": 0.5, "int8": 74.0, "int4": 4.6}[self.value]


@dataclass(frozen=True, slots=True)
class Holding:
    """A way to hold a matrix packed.

    group: columns that share a scale; 0 for all of a row.
    has_offsets, has_order: see `StoredMatrix`.
    """

    numbers: Numbers
    group: int = 0
    has_offsets: bool = False
    has_order: bool = False


class Matrix(torch.nn.Module, ABC):
    """One rank's shard of a matrix, [num_rows, num_columns], as a device holds it."""

    # Temporary bytes of a product in addition to its inputs and outputs.
    product_bytes = 0
    # Values that no parameter holds as a number of its own.
    num_packed = 0

    @abstractmethod
    def load(self, stored: StoredMatrix, piece: Piece) -> None:
        """Take over a piece of a checkpoint's matrix."""

    def floats(self) -> tuple[Tensor, ...]:
        """Return the numbers that can be NaN or infinite: plain ones, or the scales of packed ones."""
        return tuple(self.parameters())

    @abstractmethod
    def fill(self, generator: torch.Generator) -> None:
        """Make random weights."""

    @abstractmethod
    def matmul(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply inputs [T, num_columns]: [T, num_rows]."""

    def matmul_onto(self, total: Tensor, inputs: Tensor) -> Tensor:
        """Return `total` [T, num_rows] plus the product; `total` may be overwritten."""
        return total.add_(self.matmul(inputs))


class WeightFormat(ABC):
    """How a checkpoint stores a matrix."""

    # What users call it; "" for plain numbers.
    quantization = ""

    @property
    def holding(self) -> Holding | None:
        """How a device may hold such matrices packed; None where it holds their values."""
        return None

    @abstractmethod
    def parts(self, name: str, shape: tuple[int, int]) -> dict[str, Part]:
        """Return the tensors of the checkpoint's matrix `name`, of this shape, by their names there."""

    @abstractmethod
    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], device: torch.device
    ) -> StoredMatrix:
        """Return the matrix of this shape from its tensors by their roles, which lie on the CPU. Raises ModelError."""

    @abstractmethod
    def matrix(self, num_rows: int, num_columns: int, target: Target) -> Matrix:
        """Allocate what the target's device holds of such a matrix."""


class PlainMatrix(Matrix):
    """A matrix in the model's own type."""

    def __init__(self, num_rows: int, num_columns: int, target: Target) -> None:
        super().__init__()
        self.weight = target.empty(num_rows, num_columns)

    def load(self, stored: StoredMatrix, piece: Piece) -> None:
        self.weight[piece.target].copy_(stored.rows(piece.rows).values()[:, piece.columns])

    def fill(self, generator: torch.Generator) -> None:
        fill_random(self.weight, generator)

    def matmul(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(inputs, self.weight, bias)

    def matmul_onto(self, total: Tensor, inputs: Tensor) -> Tensor:
        return total.addmm_(inputs, self.weight.t())


@dataclass(frozen=True)
class Plain(WeightFormat):
    """A tensor of floats."""

    def parts(self, name: str, shape: tuple[int, int]) -> dict[str, Part]:
        return {f"{name}.weight": Part("weight", shape)}

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], device: torch.device
    ) -> StoredMatrix:
        return StoredMatrix(tensors["weight"])

    def matrix(self, num_rows: int, num_columns: int, target: Target) -> Matrix:
        return PlainMatrix(num_rows, num_columns, target)


PLAIN = Plain()


class Reader:
    """Collects a matrix's tensors, which come one by one, until the matrix can be read.

    name: the module's in the checkpoint.
    """

    def __init__(self, format: WeightFormat, name: str, shape: tuple[int, int]) -> None:
        self.parts = format.parts(name, shape)
        self._format, self._name, self._shape = format, name, shape
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor, device: torch.device) -> StoredMatrix | None:
        """Return the matrix with its last tensor, else None."""
        self._tensors[self.parts[name].role] = tensor
        if len(self._tensors) < len(self.parts):
            return None
        tensors, self._tensors = self._tensors, {}
        try:
            return self._format.read(tensors, self._shape, device)
        except ModelError as exc:
            raise ModelError(f"{self._name}: {exc}") from exc
