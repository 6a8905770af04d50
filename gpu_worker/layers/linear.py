"""A projection, and the formats in which its matrix can be stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.layers.block import Block, Part, Target, fill_random


class Split(Enum):
    """How ranks divide a matrix.

    ROWS: each rank computes a part of the outputs. COLUMNS: each rank reads a part of the inputs, and the sum over
    the ranks is the output.
    """

    ROWS = auto()
    COLUMNS = auto()


class Piece(NamedTuple):
    """The region `rows`, `columns` of a checkpoint's matrix, which fills a rank's matrix from `row` on."""

    rows: slice
    columns: slice
    row: int

    @property
    def target(self) -> slice:
        """Rows of the rank's matrix."""
        return slice(self.row, self.row + self.rows.stop - self.rows.start)


class WeightFormat(torch.nn.Module, ABC):
    """How a matrix is stored, loaded and multiplied. An instance holds one rank's shard, [num_rows, num_columns]."""

    def __init__(self, num_rows: int, num_columns: int, target: Target) -> None:
        super().__init__()

    @staticmethod
    @abstractmethod
    def parts(name: str, shape: tuple[int, int]) -> dict[str, Part]:
        """Return the tensors of the checkpoint's matrix `name`, of this shape, by their names there."""

    @abstractmethod
    def load(self, role: str, tensor: Tensor, piece: Piece) -> None:
        """Take over a piece of the matrix from its tensor of this role."""

    @abstractmethod
    def fill(self, generator: torch.Generator) -> None:
        """Make random weights."""

    @abstractmethod
    def matmul(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply inputs [T, num_columns]: [T, num_rows]."""

    def matmul_onto(self, total: Tensor, inputs: Tensor) -> Tensor:
        """Add the product to `total` [T, num_rows] in place."""
        return total.add_(self.matmul(inputs))


class Plain(WeightFormat):
    """A matrix in the model's own type."""

    def __init__(self, num_rows: int, num_columns: int, target: Target) -> None:
        super().__init__(num_rows, num_columns, target)
        self.weight = target.empty(num_rows, num_columns)

    @staticmethod
    def parts(name: str, shape: tuple[int, int]) -> dict[str, Part]:
        return {f"{name}.weight": Part("weight", shape)}

    def load(self, role: str, tensor: Tensor, piece: Piece) -> None:
        self.weight[piece.target].copy_(tensor[piece.rows, piece.columns])

    def fill(self, generator: torch.Generator) -> None:
        fill_random(self.weight, generator)

    def matmul(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(inputs, self.weight, bias)

    def matmul_onto(self, total: Tensor, inputs: Tensor) -> Tensor:
        return total.addmm_(inputs, self.weight.t())


class Source(NamedTuple):
    """A matrix of the checkpoint.

    name: its module's, within the layer.
    sizes: rows of each output that the matrix computes; ranks divide each of them.
    """

    name: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A projection of `num_inputs` to the outputs of all sources, one behind the other, in one product."""

    num_inputs: int
    sources: tuple[Source, ...]
    bias: bool = False
    split: Split = Split.ROWS
    format: type[WeightFormat] = Plain

    @property
    def num_outputs(self) -> int:
        return sum(sum(source.sizes) for source in self.sources)


class Linear(Block):
    """A rank's shard of a projection.

    prefix: the layer's, before the sources' names.
    """

    def __init__(self, spec: LinearSpec, prefix: str, target: Target) -> None:
        super().__init__()
        columns, adds_bias = slice(0, spec.num_inputs), spec.bias
        if spec.split is Split.COLUMNS:
            columns = target.rank.of(spec.num_inputs, f"inputs of {spec.sources[0].name}")
            # the sum over the ranks has it once
            adds_bias &= target.rank.index == 0
        self._parts: dict[str, tuple[Part, list[Piece]]] = {}
        num_rows = 0
        for source in spec.sources:
            pieces, begin = [], 0
            for size in source.sizes:
                rows = slice(0, size)
                if spec.split is Split.ROWS:
                    rows = target.rank.of(size, f"outputs of {source.name}")
                pieces.append(Piece(slice(begin + rows.start, begin + rows.stop), columns, num_rows))
                begin += size
                num_rows = pieces[-1].target.stop
            name = prefix + source.name
            for part_name, part in spec.format.parts(name, (begin, spec.num_inputs)).items():
                self._parts[part_name] = part, pieces
            if spec.bias:
                self._parts[f"{name}.bias"] = Part("bias", (begin,)), pieces
        self.matrix = spec.format(num_rows, columns.stop - columns.start, target)
        self.bias = target.empty(num_rows) if adds_bias else None

    def parts(self) -> dict[str, Part]:
        return {name: part for name, (part, _) in self._parts.items()}

    def load(self, name: str, tensor: Tensor) -> None:
        part, pieces = self._parts[name]
        for piece in pieces:
            if part.role != "bias":
                self.matrix.load(part.role, tensor, piece)
            elif self.bias is not None:
                self.bias[piece.target].copy_(tensor[piece.rows])

    def fill(self, generator: torch.Generator) -> None:
        self.matrix.fill(generator)
        if self.bias is not None:
            fill_random(self.bias, generator)

    def matmul(self, inputs: Tensor) -> Tensor:
        """Multiply inputs [T, num_inputs]: [T, num_outputs], of a rank its part or summand of them."""
        return self.matrix.matmul(inputs, self.bias)

    def matmul_onto(self, total: Tensor, inputs: Tensor) -> Tensor:
        """Add the outputs to `total` in place."""
        if self.bias is not None:
            return total.add_(self.matmul(inputs))
        return self.matrix.matmul_onto(total, inputs)
