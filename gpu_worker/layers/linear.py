"""A projection: the checkpoint's matrices that it computes with, and a rank's shard of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_worker.layers.block import Block, Part, Target, fill_random
from gpu_worker.layers.packed import hold
from gpu_worker.layers.weights import PLAIN, Piece, Reader, WeightFormat


class Split(Enum):
    """How ranks divide a matrix.

    ROWS: each rank computes a part of the outputs. COLUMNS: each rank reads a part of the inputs, and the sum over
    the ranks is the output.
    """

    ROWS = auto()
    COLUMNS = auto()


class Source(NamedTuple):
    """A matrix of the checkpoint.

    name: its module's, within the layer.
    sizes: rows of each output that the matrix computes; ranks divide each of them.
    """

    name: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A projection of `num_inputs` to the outputs of all sources, one behind the other, in one product.

    format: of matrices that the target names no format of.
    """

    num_inputs: int
    sources: tuple[Source, ...]
    bias: bool = False
    split: Split = Split.ROWS
    format: WeightFormat = PLAIN

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
        self._biases: dict[str, tuple[Part, list[Piece]]] = {}
        self._readers: dict[str, tuple[Reader, list[Piece]]] = {}
        self.modules_read = tuple(prefix + source.name for source in spec.sources)
        formats = [target.formats.get(name, spec.format) for name in self.modules_read]
        num_rows = 0
        for source, name, stored in zip(spec.sources, self.modules_read, formats, strict=True):
            pieces, begin = [], 0
            for size in source.sizes:
                rows = slice(0, size)
                if spec.split is Split.ROWS:
                    rows = target.rank.of(size, f"outputs of {source.name}")
                pieces.append(Piece(slice(begin + rows.start, begin + rows.stop), columns, num_rows))
                begin += size
                num_rows = pieces[-1].target.stop
            reader = Reader(stored, name, (begin, spec.num_inputs))
            self._readers |= dict.fromkeys(reader.parts, (reader, pieces))
            if spec.bias:
                self._biases[f"{name}.bias"] = Part("bias", (begin,)), pieces
        num_columns = columns.stop - columns.start
        if all(each == formats[0] for each in formats):
            self.matrix = formats[0].matrix(num_rows, num_columns, target)
        else:
            self.matrix = hold([each.holding for each in formats], (num_rows, num_columns), target)
        self.bias = target.empty(num_rows) if adds_bias else None
        self._device = target.device

    def parts(self) -> dict[str, Part]:
        weights = {name: reader.parts[name] for name, (reader, _) in self._readers.items()}
        return weights | {name: part for name, (part, _) in self._biases.items()}

    def load(self, name: str, tensor: Tensor) -> None:
        if name in self._biases:
            for piece in self._biases[name][1]:
                if self.bias is not None:
                    self.bias[piece.target].copy_(tensor[piece.rows])
            return
        reader, pieces = self._readers[name]
        stored = reader.add(name, tensor, self._device)
        if stored is not None:
            for piece in pieces:
                self.matrix.load(stored, piece)

    def floats(self) -> tuple[Tensor, ...]:
        biases = () if self.bias is None else (self.bias,)
        return (*self.matrix.floats(), *biases)

    def fill(self, generator: torch.Generator) -> None:
        self.matrix.fill(generator)
        if self.bias is not None:
            fill_random(self.bias, generator)

    def matmul(self, inputs: Tensor) -> Tensor:
        """Multiply inputs [T, num_inputs]: [T, num_outputs], of a rank its part or summand of them."""
        return self.matrix.matmul(inputs, self.bias)

    def matmul_onto(self, total: Tensor, inputs: Tensor) -> Tensor:
        """Return `total` plus the outputs; `total` may be overwritten."""
        if self.bias is not None:
            return total.add_(self.matmul(inputs))
        return self.matrix.matmul_onto(total, inputs)


def linear_modules(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the modules of the checkpoint whose matrices the projections of a model read."""
    linears = (module for module in model.modules() if isinstance(module, Linear))
    return tuple(name for linear in linears for name in linear.modules_read)
