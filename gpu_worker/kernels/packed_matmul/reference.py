"""The definition of a packed matrix and of products with it, in PyTorch; it is also what a CPU runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Columns that a step of a product reads, at most; a group of more columns takes several steps.
MAX_SPAN = 128
# Four bits hold a number from -8 to 7, stored from 0 on.
NIBBLE_CENTRE = 8


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [N, K]: value[n, k] = number[n, k] * scale[k // group, n] + offset[k // group, n].

    codes: the numbers. One a byte: float8_e4m3fn [N, K], without NaN, or int8 [steps, N, span], which has column k at
        [k // span, :, k % span]. Two a byte: uint8 [steps, N, span / 2], the first half of a step's columns in the low
        nibbles, 8 added to each number.
    scales: float32 [ceil(K / group), N] without offsets; with them int32, pairs of float16: a scale in the low half, an
        offset in the high one. A kernel reads either in one word, which it can read ahead.
    tickets: int32 zeros, one for each 16 rows; a product uses them and leaves zeros, so one product with a matrix runs
        at a time.
    num_columns: K.
    group: columns that share a scale.
    """

    codes: Tensor
    scales: Tensor
    tickets: Tensor
    num_columns: int
    group: int

    @property
    def has_offsets(self) -> bool:
        return self.scales.dtype == torch.int32

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def num_rows(self) -> int:
        return self.scales.shape[1]

    @property
    def span(self) -> int:
        """Columns of a step."""
        return span_of(self.num_columns, self.group)

    @property
    def num_steps(self) -> int:
        return -(-self.num_columns // self.span)


def span_of(num_columns: int, group: int) -> int:
    """Return the columns of a step: a power of two that divides a group, where there are several groups."""
    return MAX_SPAN if group >= num_columns else min(MAX_SPAN, group & -group)


def packed_matmul(
    inputs: Tensor, matrix: PackedMatrix, bias: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    """Return inputs [T, K] times the matrix, plus `bias` [N] and `onto` [T, N]: [T, N] in the type of the inputs.

    inputs: float16 or bfloat16 (here also float32), contiguous rows. Sums are in float32 and rounded once.
    """
    result = inputs.float() @ unpack_rows(matrix, 0, matrix.num_rows, torch.float32).T
    for addend in (bias, onto):
        if addend is not None:
            result += addend.float()
    return result.to(inputs.dtype)


def unpack_rows(matrix: PackedMatrix, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return rows `begin` to `end` of the values, [end - begin, K] in `dtype`, computed in float32."""
    numbers = _numbers(matrix, begin, end)
    group_of = torch.arange(matrix.num_columns, device=matrix.device) // matrix.group
    scales = matrix.scales[:, begin:end].contiguous()
    if not matrix.has_offsets:
        return (numbers * scales[group_of].T).to(dtype)
    scales, offsets = scales.view(torch.float16).unflatten(1, (-1, 2)).float().unbind(2)
    return (numbers * scales[group_of].T + offsets[group_of].T).to(dtype)


def _numbers(matrix: PackedMatrix, begin: int, end: int) -> Tensor:
    """Float32 [end - begin, K]."""
    codes = matrix.codes
    if codes.dtype == torch.float8_e4m3fn:
        return codes[begin:end].float()
    steps = codes[:, begin:end]
    if codes.dtype == torch.uint8:
        steps = torch.cat([steps & 15, steps >> 4], dim=2).to(torch.int8) - NIBBLE_CENTRE
    return steps.transpose(0, 1).flatten(1)[:, : matrix.num_columns].float()


def pack_scales(scales: Tensor, offsets: Tensor | None) -> Tensor:
    """Pack scales and offsets [G, N] as `PackedMatrix.scales`."""
    if offsets is None:
        return scales.float()
    return torch.stack([scales.half(), offsets.half()], dim=2).view(torch.int32).squeeze(2)


def pack_steps(numbers: Tensor, span: int, bits: int) -> Tensor:
    """Pack whole numbers int8 [N, K] of 4 or 8 bits as `PackedMatrix.codes`; columns behind K are 0."""
    num_rows, num_columns = numbers.shape
    padded = torch.nn.functional.pad(numbers, (0, -num_columns % span))
    steps = padded.view(num_rows, -1, span).transpose(0, 1)
    if bits == 8:
        return steps.contiguous()
    low, high = (steps + NIBBLE_CENTRE).to(torch.uint8).chunk(2, dim=2)
    return low | high << 4
