"""The slabs of a sequence, as the store and its client know them: what may be written and read, checked alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest, StoreError
from kv_store.client.layout import SlabGeometry


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


class SlabTable:
    """Slabs of one sequence: `table` int32 [num_layers, slabs_per_layer], `sealed` int64 [num_layers] tokens;
    `num_prefix_tokens`, in slabs that others share."""

    def __init__(self, sequence_id: str, geometry: SlabGeometry, num_prefix_tokens: int = 0) -> None:
        self.sequence_id = sequence_id
        self.geometry = geometry
        self.table: npt.NDArray[np.int32] = np.empty((geometry.layout.num_layers, 0), np.int32)
        self.sealed: npt.NDArray[np.int64] = np.full(geometry.layout.num_layers, num_prefix_tokens, np.int64)
        self.num_prefix_tokens = num_prefix_tokens

    @property
    def slabs_per_layer(self) -> int:
        return self.table.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that the slabs of one layer can hold."""
        return self.slabs_per_layer * self.geometry.tokens_per_slab

    def adopt(self, flat: Sequence[int], slabs_per_layer: int, num_slabs: int) -> None:
        """Take over the table that the store sent, read-only. Raises StoreError for one that is none of an arena of so
        many slabs."""
        sent, num_layers = np.array(flat, np.int64), self.geometry.layout.num_layers
        if sent.size != num_layers * slabs_per_layer or sent.max(initial=0) >= num_slabs:
            raise StoreError(
                f"the store's reply has {sent.size} slabs up to {sent.max(initial=0)}: they are not "
                f"{slabs_per_layer} for each of {num_layers} layers, of {num_slabs}"
            )
        if self.num_prefix_tokens > slabs_per_layer * self.geometry.tokens_per_slab:
            raise StoreError(
                f"the store's reply shares {self.num_prefix_tokens} tokens in {slabs_per_layer} slabs of a layer"
            )
        self.table = sent.astype(np.int32).reshape(num_layers, slabs_per_layer)
        self.table.flags.writeable = False

    def cut_to_prefix(self) -> npt.NDArray[np.int32]:
        """Keep only the slabs that it shares since its begin. Returns the others."""
        num_kept = self.geometry.slabs_for(self.num_prefix_tokens)
        own = self.table[:, num_kept:].ravel()
        self.table = self.table[:, :num_kept].copy()
        np.minimum(self.sealed, self.num_prefix_tokens, out=self.sealed)
        return own

    def check_layer(self, layer: int) -> None:
        """Raises InvalidStoreRequest."""
        if not 0 <= layer < self.geometry.layout.num_layers:
            raise InvalidStoreRequest(f"layer {layer} is not from 0 to {self.geometry.layout.num_layers - 1}")

    def check_rows(self, rows: npt.NDArray[Any]) -> None:
        """Raises InvalidStoreRequest unless they are uint8 [num_kv_heads, num_tokens, row_bytes]."""
        heads, row_bytes = self.geometry.layout.num_kv_heads, self.geometry.layout.row_format.row_bytes
        if rows.ndim != 3 or (rows.shape[0], rows.shape[2]) != (heads, row_bytes):
            raise InvalidStoreRequest(
                f"rows are {list(rows.shape)}, they must be [{heads}, num_tokens, {row_bytes}]"
            )
        if rows.dtype != np.uint8:
            raise InvalidStoreRequest(f"rows are {rows.dtype}, they must be uint8")

    def check_writable(self, layer: int, token_begin: int, num_tokens: int) -> None:
        """Raises InvalidStoreRequest unless the tokens lie in reserved slabs that are not yet immutable."""
        self.check_layer(layer)
        immutable = int(self.sealed[layer]) & ~self.geometry.token_mask
        if num_tokens < 1 or not immutable <= token_begin <= self.capacity - num_tokens:
            raise InvalidStoreRequest(
                f"{num_tokens} tokens from {token_begin} in layer {layer}: tokens below {immutable} are immutable, "
                f"tokens from {self.capacity} on are not reserved"
            )

    def readable(self, layer: int, kv_head: int, positions: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Return the layer's slabs, to read positions, int64 or uint64, from. Raises InvalidStoreRequest unless all of
        them are sealed."""
        self.check_layer(layer)
        num_heads = self.geometry.layout.num_kv_heads
        if not 0 <= kv_head < num_heads:
            raise InvalidStoreRequest(f"KV head {kv_head} is not from 0 to {num_heads - 1}")
        if not positions.size:
            return self.table[layer]
        lowest, highest, sealed = int(positions.min()), int(positions.max()), int(self.sealed[layer])
        if lowest < 0 or highest >= sealed:
            raise InvalidStoreRequest(
                f"positions {lowest} to {highest} of layer {layer} are not among the {sealed} sealed tokens of "
                f"sequence {self.sequence_id!r}"
            )
        return self.table[layer]
