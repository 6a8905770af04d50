"""Rows of any type as words of 4 bytes, in which the programs copy them."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BYTES = 4


def unit_of(row_bytes: int) -> int:
    """Words that offsets and rows are multiples of: 4 let every access be one of 16 bytes.

    Raises ValueError for rows that are no whole words.
    """
    if row_bytes % WORD_BYTES:
        raise ValueError(f"rows of {row_bytes} bytes cannot be copied in words of {WORD_BYTES}")
    return 4 if row_bytes % 16 == 0 else 2 if row_bytes % 8 == 0 else 1


def words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


def arena_words(arena: Tensor) -> Tensor:
    return words(arena[: arena.shape[0] // WORD_BYTES * WORD_BYTES])
