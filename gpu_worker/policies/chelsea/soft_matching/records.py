"""Rows that stand for several tokens, and which of them are alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Cosines are told apart by 2**-12, about what 16-bit keys say. In the first layer the same two tokens at the same
# distance are equally alike wherever they stand, and the last bit of a sum must not decide which of them merge.
STEPS = 1 << 12


@dataclass(frozen=True, slots=True)
class Matches:
    """source: int64 [A], the 1st, 3rd, ... row of each chunk, ascending; where a chunk is one row only, it is left out.
    partner: int64 [H, A], of the chunk's other rows the one with the highest cosine, the first where they tie.
    similarity: float32 [H, A], that cosine, in steps of 2**-12, by which it is the highest too.
    """

    source: Tensor
    partner: Tensor
    similarity: Tensor


@dataclass(frozen=True, slots=True)
class WeightedRows:
    """Some rows of every head by ascending position. positions: int64 [H, M]. degrees: float32 [H, M], how many tokens
    a row stands for. keys, values: [H, M, d] of one type."""

    positions: Tensor
    degrees: Tensor
    keys: Tensor
    values: Tensor

    @property
    def device(self) -> torch.device:
        return self.keys.device


def num_matches(num_rows: int, chunk: int) -> int:
    """Rows that have a partner."""
    num_full, rest = divmod(num_rows, chunk)
    # The odd row of a chunk seeks a partner too (CH-A7).
    return num_full * ((chunk + 1) // 2) + (0 if rest == 1 else (rest + 1) // 2)


def check_merged(num_rows: int, chunk: int, num_merged: int) -> None:
    """Raises ValueError where so many rows have no partner."""
    most = num_matches(num_rows, chunk)
    if not 0 <= num_merged <= most:
        raise ValueError(
            f"{num_merged} rows cannot merge: of {num_rows} in chunks of {chunk}, {most} have a partner"
        )
