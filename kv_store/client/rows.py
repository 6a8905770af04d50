"""Which rows a worker wants of the store, and those that it finds there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class RowsWanted:
    """Rows of one KV head of one sequence, in this order; `positions` int64 [num_rows]."""

    sequence_id: str
    kv_head: int
    positions: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TopKWanted:
    """A selection in one sequence: the `k` best of the candidates [token_begin, token_end).

    queries: float32 [num_kv_heads, group_size, head_dim]. resident: bool [num_kv_heads, candidates], true where the row
    is not wanted; None: no rows are.
    """

    sequence_id: str
    token_begin: int
    token_end: int
    k: int
    queries: npt.NDArray[np.float32]
    resident: npt.NDArray[np.bool_] | None = None


def count_rows(wanted: Sequence[RowsWanted]) -> int:
    """Rows of all items."""
    return sum(item.positions.size for item in wanted)


@dataclass(frozen=True, slots=True)
class Begun:
    """The slabs of a sequence that has begun.

    num_shared: tokens, its first ones, in slabs that it shares.
    slab_table: int32 [num_layers, slabs_per_layer], read-only, the shared slabs first."""

    num_shared: int
    slab_table: npt.NDArray[np.int32]
