"""Matrices that a device holds in 8 or 4 bits a number, as the checkpoint stores them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_worker.errors import ModelError
from gpu_worker.kernels.packed_matmul import PackedMatrix, packed_matmul, unpack_rows
from gpu_worker.kernels.packed_matmul.reference import NIBBLE_CENTRE, pack_scales, pack_steps, span_of
from gpu_worker.kernels.quantise_rows import quantise_rows
from gpu_worker.layers.block import Target
from gpu_worker.layers.weights import Holding, Matrix, Numbers, Piece, PlainMatrix, StoredMatrix

# Devices whose kernels read packed matrices; others hold the values.
PACKING_DEVICES = ("cuda",)
# Inputs up to which the packed matrix is read as it is; of more, a product of 8-bit numbers or of unpacked rows is
# faster.
FEW_ROWS = {"e4m3": 64, "int8": 128, "int4": 128}
# Bytes of rows that are unpacked at a time.
UNPACKED_BYTES = 64 << 20
# Where PyTorch multiplies 8-bit rows that each have a scale, to bfloat16, and the multiple that its sizes must have.
SCALED_CAPABILITY, SCALED_MULTIPLE = (9, 0), 16
ROWS_OF_E4M3 = Holding(Numbers.E4M3)
_RANDOM_STD = 0.02


def hold(holdings: Sequence[Holding | None], size: tuple[int, int], target: Target) -> Matrix:
    """Return one matrix for sources that are held in these ways: packed, or plain where the target's device has no
    kernels for it."""
    holding = _joined(holdings, size[1])
    is_half = target.dtype in (torch.bfloat16, torch.float16)
    if holding is None or target.device.type not in PACKING_DEVICES or not is_half:
        return PlainMatrix(*size, target)
    span = span_of(size[1], holding.group or size[1])
    if span < (32 if holding.numbers is Numbers.INT4 else 16):
        return PlainMatrix(*size, target)
    if holding == ROWS_OF_E4M3 and _multiplies_rows(target, size):
        return ScaledRows(size, target)
    return PackedWeights(holding, size, target)


def _joined(holdings: Sequence[Holding | None], num_columns: int) -> Holding | None:
    """Return the way that has all of these: more bits, smaller groups. None where there is none."""
    found = [each for each in holdings if each is not None]
    if len(found) < len(holdings) or len(set(found)) == 1:
        return found[0] if len(found) == len(holdings) else None
    groups = {each.group or num_columns for each in found}
    if any(each.numbers is Numbers.E4M3 or each.has_order for each in found):
        return None
    if any(group % min(groups) for group in groups):
        return None
    return Holding(
        Numbers.INT8 if any(each.numbers is Numbers.INT8 for each in found) else Numbers.INT4,
        min(groups),
        any(each.has_offsets for each in found),
    )


def _multiplies_rows(target: Target, size: tuple[int, int]) -> bool:
    is_whole = not any(each % SCALED_MULTIPLE for each in size)
    if target.device.type != "cuda" or target.dtype != torch.bfloat16 or not is_whole:
        return False
    return torch.cuda.get_device_capability(target.device) >= SCALED_CAPABILITY


class PackedWeights(Matrix):
    """Numbers that few inputs are multiplied by as they are; for many, some rows at a time are unpacked.

    Its tensors are buffers: none of them has a number for each value.
    """

    product_bytes = UNPACKED_BYTES

    def __init__(
        self,
        holding: Holding,
        size: tuple[int, int],
        target: Target,
    ) -> None:
        super().__init__()
        numbers = holding.numbers
        self._numbers, self._few = numbers, FEW_ROWS[numbers.value]
        num_rows, num_columns = size
        group = holding.group or num_columns
        self.num_packed = num_rows * num_columns
        self._span, device = span_of(num_columns, group), target.device
        num_steps, num_groups = -(-num_columns // self._span), -(-num_columns // group)
        shapes = {
            Numbers.E4M3: (size, torch.float8_e4m3fn),
            Numbers.INT8: ((num_steps, num_rows, self._span), torch.int8),
            Numbers.INT4: ((num_steps, num_rows, self._span // 2), torch.uint8),
        }
        shape, dtype = shapes[numbers]
        self.register_buffer("codes", codes := torch.empty(shape, dtype=dtype, device=device))
        scale_dtype = torch.int32 if holding.has_offsets else torch.float32
        self.register_buffer(
            "scales", scales := torch.empty((num_groups, num_rows), dtype=scale_dtype, device=device)
        )
        self._order: Tensor | None = None
        if holding.has_order:
            self.register_buffer("order", torch.full((num_columns,), -1, device=device))
            self._order = self.get_buffer("order")
        tickets = torch.zeros(-(-num_rows // 16), dtype=torch.int32, device=device)
        self.packed = PackedMatrix(codes, scales, tickets, num_columns, group)

    def floats(self) -> tuple[Tensor, ...]:
        scales = self.packed.scales
        return (scales.view(torch.float16) if self.packed.has_offsets else scales,)

    def load(self, stored: StoredMatrix, piece: Piece) -> None:
        part, rows = stored.rows(piece.rows).columns(piece.columns), piece.target
        assert part.scales is not None
        codes, scales, offsets = part.codes, part.scales, part.offsets
        if self._numbers is Numbers.E4M3:
            self.packed.codes[rows] = codes
        elif self._numbers is Numbers.INT8:
            self.packed.codes[:, rows] = pack_steps(codes.to(torch.int8), self._span, 8)
        else:
            if codes.dtype == torch.uint8:
                codes = codes.to(torch.int8) - NIBBLE_CENTRE
                offsets = (0 if offsets is None else offsets) + NIBBLE_CENTRE * scales
            self.packed.codes[:, rows] = pack_steps(codes, self._span, 4)
        if self.packed.has_offsets:
            offsets = torch.zeros_like(scales) if offsets is None else offsets
        packed_scales = pack_scales(
            self._by_group(scales, part.group),
            None if offsets is None else self._by_group(offsets, part.group),
        )
        self.packed.scales[:, rows] = packed_scales
        if part.order is not None:
            self._load_order(part.order)

    def _by_group(self, per_group: Tensor, group: int) -> Tensor:
        """Numbers [R, G] of groups of so many columns, by the matrix's own groups: [own groups, R]."""
        num_columns, own = self.packed.num_columns, self.packed.group
        times = -(-(group or num_columns) // own)
        return per_group.repeat_interleave(times, dim=1)[:, : -(-num_columns // own)].T

    def _load_order(self, order: Tensor) -> None:
        own = self._order
        assert own is not None
        if int(own[0]) >= 0 and not torch.equal(own, order):
            raise ModelError(
                "projections of the same inputs were quantised in different orders (g_idx), which is not supported: "
                "take weights that were quantised without desc_act"
            )
        own.copy_(order)

    def fill(self, generator: torch.Generator) -> None:
        codes = self.packed.codes.view(torch.uint8)
        codes.random_(0, 256, generator=generator)
        if self._numbers is Numbers.E4M3:
            # below 2, and never NaN
            codes &= 0xBF
        scales = torch.full(self.packed.scales.shape, _RANDOM_STD / self._numbers.std, device=codes.device)
        self.packed.scales.copy_(
            pack_scales(scales, torch.zeros_like(scales) if self.packed.has_offsets else None)
        )
        if self._order is not None:
            torch.arange(len(self._order), out=self._order)

    def matmul(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._multiply(inputs, bias, None)

    def matmul_onto(self, total: Tensor, inputs: Tensor) -> Tensor:
        return self._multiply(inputs, None, total)

    def _multiply(self, inputs: Tensor, bias: Tensor | None, onto: Tensor | None) -> Tensor:
        if self._order is not None:
            inputs = inputs.index_select(1, self._order)
        if len(inputs) <= self._few:
            return packed_matmul(inputs, self.packed, bias, onto)
        product = self._multiply_many(inputs)
        for addend in (bias, onto):
            if addend is not None:
                product += addend
        return product

    def _multiply_many(self, inputs: Tensor) -> Tensor:
        num_rows, dtype = self.packed.num_rows, inputs.dtype
        out = inputs.new_empty(len(inputs), num_rows)
        at_once = max(1, UNPACKED_BYTES // (self.packed.num_columns * dtype.itemsize))
        for begin in range(0, num_rows, at_once):
            end = min(begin + at_once, num_rows)
            # no name keeps the rows while the next ones are unpacked
            torch.mm(inputs, unpack_rows(self.packed, begin, end, dtype).t(), out=out[:, begin:end])
        return out


class ScaledRows(PackedWeights):
    """E4M3 numbers with a scale for each row, which many inputs, quantised row by row, are multiplied by directly."""

    # quantised inputs take less than the activations that the memory plan counts
    product_bytes = 0

    def __init__(self, size: tuple[int, int], target: Target) -> None:
        super().__init__(ROWS_OF_E4M3, size, target)

    def _multiply_many(self, inputs: Tensor) -> Tensor:
        codes, scales = quantise_rows(inputs)
        return torch._scaled_mm(
            codes,
            self.packed.codes.t(),
            scale_a=scales,
            scale_b=self.packed.scales,
            out_dtype=inputs.dtype,
        )
