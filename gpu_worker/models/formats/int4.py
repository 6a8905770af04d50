"""Matrices of 4-bit numbers in groups of columns: AWQ, GPTQ, and compressed-tensors' packed ones.

Each stores numbers from 0 to 15 in words of 32 bits, and of each group a scale and the number that stands for 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.errors import ModelError
from gpu_worker.layers import Holding, Matrix, Numbers, Part, StoredMatrix, Target, WeightFormat
from gpu_worker.layers.block import FLOATS
from gpu_worker.layers.packed import hold

WORDS = ("I32",)
CENTRE = 8
# The column that each nibble of a word of AWQ holds, from the lowest on.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Int4(WeightFormat):
    """value = (number - zero) * scale.

    group: columns that share a scale; 0 for all.
    has_zeros: the tensors have zeros; of others the zero is 8.
    has_order: groups are of columns that do not follow each other.
    """

    group: int
    has_zeros: bool
    has_order: bool = False

    def num_groups(self, num_columns: int) -> int:
        return -(-num_columns // self.group) if self.group else 1

    @property
    def holding(self) -> Holding:
        return Holding(Numbers.INT4, self.group, self.has_zeros, self.has_order)

    def matrix(self, num_rows: int, num_columns: int, target: Target) -> Matrix:
        return hold((self.holding,), (num_rows, num_columns), target)

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], device: torch.device
    ) -> StoredMatrix:
        on_device = {role: tensor.to(device) for role, tensor in tensors.items()}
        numbers, scales, zeros = self.unpack(on_device)
        numbers -= CENTRE
        offsets = (CENTRE - zeros.float()) * scales.float() if self.has_zeros else None
        order = self._order(on_device["groups"].long()) if self.has_order else None
        if order is not None:
            numbers = numbers[:, order]
        return StoredMatrix(numbers, scales, offsets, self.group, order)

    def _order(self, groups: Tensor) -> Tensor:
        """Columns by their groups. Raises ModelError unless all groups have as many."""
        order = torch.argsort(groups, stable=True)
        places = torch.arange(len(groups), device=groups.device)
        if not torch.equal(groups[order], places // (self.group or len(groups))):
            raise ModelError(
                f"the columns' groups (g_idx) are not of {self.group or len(groups)} columns each; download the "
                "weights again"
            )
        return order

    @abstractmethod
    def unpack(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return numbers int8 [N, K], scales [N, G] and zeros [N, G]; without `has_zeros` these mean nothing."""


@dataclass(frozen=True)
class Awq(Int4):
    """Words along the rows, in AWQ's order."""

    quantization = "awq"

    def parts(self, name: str, shape: tuple[int, int]) -> dict[str, Part]:
        num_rows, num_columns = shape
        num_groups = self.num_groups(num_columns)
        return {
            f"{name}.qweight": Part("words", (num_columns, num_rows // 8), WORDS),
            f"{name}.qzeros": Part("zeros", (num_groups, num_rows // 8), WORDS),
            f"{name}.scales": Part("scales", (num_groups, num_rows), FLOATS),
        }

    def unpack(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        numbers, zeros = (_nibbles(tensors[role], _AWQ_COLUMNS).T for role in ("words", "zeros"))
        return numbers.contiguous(), tensors["scales"].T, zeros


@dataclass(frozen=True)
class Gptq(Int4):
    """Words along the columns; zeros along the rows.

    zero_shift: added to the stored zeros: 1, and 0 in the second version.
    """

    zero_shift: int = 1
    quantization = "gptq"

    def parts(self, name: str, shape: tuple[int, int]) -> dict[str, Part]:
        num_rows, num_columns = shape
        num_groups = self.num_groups(num_columns)
        parts = {
            f"{name}.qweight": Part("words", (num_columns // 8, num_rows), WORDS),
            f"{name}.qzeros": Part("zeros", (num_groups, num_rows // 8), WORDS),
            f"{name}.scales": Part("scales", (num_groups, num_rows), FLOATS),
        }
        return parts | ({f"{name}.g_idx": Part("groups", (num_columns,), WORDS)} if self.has_order else {})

    def unpack(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        numbers = _nibbles(tensors["words"].T.contiguous())
        # a zero of 15 becomes 16
        zeros = _nibbles(tensors["zeros"]).T + self.zero_shift
        if not self.has_zeros and (zeros != CENTRE).any():
            raise ModelError("the settings say `sym`, but zeros (qzeros) differ from 8: set `sym` to false")
        return numbers, tensors["scales"].T, zeros


@dataclass(frozen=True)
class PackQuantized(Int4):
    """compressed-tensors: words along the columns; zeros, where there are any, along the rows."""

    quantization = "compressed-tensors"

    def parts(self, name: str, shape: tuple[int, int]) -> dict[str, Part]:
        num_rows, num_columns = shape
        num_groups = self.num_groups(num_columns)
        parts = {
            f"{name}.weight_packed": Part("words", (num_rows, num_columns // 8), WORDS),
            f"{name}.weight_scale": Part("scales", (num_rows, num_groups), FLOATS),
        }
        if self.has_zeros:
            parts[f"{name}.weight_zero_point"] = Part("zeros", (num_rows // 8, num_groups), WORDS)
        if self.has_order:
            parts[f"{name}.weight_g_idx"] = Part("groups", (num_columns,), WORDS)
        return parts

    def unpack(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        numbers, scales = _nibbles(tensors["words"]), tensors["scales"]
        if not self.has_zeros:
            return numbers, scales, scales
        return numbers, scales, _nibbles(tensors["zeros"].T.contiguous()).T


def _nibbles(words: Tensor, columns: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Unpack int32 [R, C] to int8 [R, 8 C]. columns: the place in a word of each nibble, from the lowest on."""
    raw = words.contiguous().view(torch.uint8)
    nibbles = torch.stack([raw & 15, raw >> 4], dim=2).view(torch.int8).view(len(words), -1, 8)
    places = [columns.index(place) for place in range(8)]
    return nibbles[:, :, places].flatten(1)
