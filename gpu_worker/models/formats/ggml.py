"""Matrices in ggml's blocks of whole numbers: rows of bytes, which are unpacked to numbers, scales and offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_worker.layers import Holding, Matrix, Numbers, Part, StoredMatrix, Target, WeightFormat
from gpu_worker.layers.packed import hold


class Blocks(NamedTuple):
    """Blocks [B]: numbers [B, block size], and of each group in a block a scale and, or None, an offset [B, groups]."""

    numbers: Tensor
    scales: Tensor
    offsets: Tensor | None = None


@dataclass(frozen=True)
class BlockType:
    """A type of ggml's.

    size, num_bytes: numbers and bytes of a block.
    group: numbers that share a scale.
    unpack: bytes uint8 [B, num_bytes] to blocks.
    """

    numbers: Numbers
    size: int
    num_bytes: int
    group: int
    has_offsets: bool
    unpack: Callable[[Tensor], Blocks]


@dataclass(frozen=True)
class Ggml(WeightFormat):
    """type_id: a type of BLOCK_TYPES."""

    type_id: int
    quantization = "GGUF"

    def parts(self, name: str, shape: tuple[int, int]) -> dict[str, Part]:
        return {f"{name}.weight": Part("rows", shape)}

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], device: torch.device
    ) -> StoredMatrix:
        """rows: uint8 [N, bytes of a row]."""
        kind = BLOCK_TYPES[self.type_id]
        blocks = kind.unpack(tensors["rows"].to(device).view(-1, kind.num_bytes))
        scales, offsets = (
            None if each is None else each.reshape(shape[0], -1) for each in (blocks.scales, blocks.offsets)
        )
        return StoredMatrix(blocks.numbers.reshape(shape), scales, offsets, kind.group)

    @property
    def holding(self) -> Holding:
        kind = BLOCK_TYPES[self.type_id]
        return Holding(kind.numbers, kind.group, kind.has_offsets)

    def matrix(self, num_rows: int, num_columns: int, target: Target) -> Matrix:
        return hold((self.holding,), (num_rows, num_columns), target)


def _float16(raw: Tensor, place: int) -> Tensor:
    """The number at this byte of every block, float32 [B, 1]."""
    return raw[:, place : place + 2].contiguous().view(torch.float16).float()


def _halves(raw: Tensor) -> Tensor:
    """Low nibbles, then high ones: [B, n] to [B, 2 n]."""
    return torch.cat([raw & 15, raw >> 4], dim=1)


def _bits(raw: Tensor) -> Tensor:
    """Bits from the lowest of the first byte on: [B, n] to [B, 8 n]."""
    places = torch.arange(8, device=raw.device, dtype=torch.uint8)
    return ((raw[:, :, None] >> places) & 1).flatten(1)


def _q8_0(raw: Tensor) -> Blocks:
    return Blocks(raw[:, 2:].contiguous().view(torch.int8), _float16(raw, 0))


def _q4_0(raw: Tensor) -> Blocks:
    return Blocks(_halves(raw[:, 2:]).to(torch.int8) - 8, _float16(raw, 0))


def _q4_1(raw: Tensor) -> Blocks:
    return Blocks(_halves(raw[:, 4:]), _float16(raw, 0), _float16(raw, 2))


def _q5_0(raw: Tensor) -> Blocks:
    numbers = _halves(raw[:, 6:]) | _bits(raw[:, 2:6]) << 4
    return Blocks(numbers.to(torch.int8) - 16, _float16(raw, 0))


def _q5_1(raw: Tensor) -> Blocks:
    numbers = _halves(raw[:, 8:]) | _bits(raw[:, 4:8]) << 4
    return Blocks(numbers.to(torch.int8), _float16(raw, 0), _float16(raw, 2))


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets float32 [B, 8] of blocks that begin with their factors; each has 6 bits of 12 bytes."""
    first, second, third = raw[:, 4:16].split(4, dim=1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    offsets = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    return _float16(raw, 0) * scales.float(), -(_float16(raw, 2) * offsets.float())


def _q4_k(raw: Tensor) -> Blocks:
    numbers = _halves(raw[:, 16:].reshape(-1, 32)).reshape(-1, 256)
    return Blocks(numbers, *_k_scales(raw))


def _q5_k(raw: Tensor) -> Blocks:
    low = _halves(raw[:, 48:].reshape(-1, 32)).view(-1, 8, 32)
    # bit i of a byte belongs to the i-th 32 numbers
    places = torch.arange(8, device=raw.device, dtype=torch.uint8)[:, None]
    high = (raw[:, None, 16:48] >> places) & 1
    return Blocks((low | high << 4).to(torch.int8).flatten(1), *_k_scales(raw))


def _q6_k(raw: Tensor) -> Blocks:
    low = _halves(raw[:, :128].reshape(-1, 64)).view(-1, 2, 4, 32)
    # two bits of a byte belong to each of four times 32 numbers
    places = torch.tensor([0, 2, 4, 6], device=raw.device, dtype=torch.uint8)[:, None]
    high = (raw[:, 128:192].reshape(-1, 2, 1, 32) >> places) & 3
    scales = raw[:, 192:208].contiguous().view(torch.int8).float() * _float16(raw, 208)
    return Blocks((low | high << 4).to(torch.int8).flatten(1) - 32, scales)


# By ggml's number of the type.
BLOCK_TYPES = {
    2: BlockType(Numbers.INT4, 32, 18, 32, False, _q4_0),
    3: BlockType(Numbers.INT4, 32, 20, 32, True, _q4_1),
    6: BlockType(Numbers.INT8, 32, 22, 32, False, _q5_0),
    7: BlockType(Numbers.INT8, 32, 24, 32, True, _q5_1),
    8: BlockType(Numbers.INT8, 32, 34, 32, False, _q8_0),
    12: BlockType(Numbers.INT4, 256, 144, 32, True, _q4_k),
    13: BlockType(Numbers.INT8, 256, 176, 32, True, _q5_k),
    14: BlockType(Numbers.INT8, 256, 210, 16, False, _q6_k),
}
