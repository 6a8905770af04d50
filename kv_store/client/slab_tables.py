"""The client's own slab tables: what it may write, checked without asking the store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest, NotInStore, StoreError
from kv_store.client.layout import Layout, SlabGeometry
from kv_store.client.rows import RowsWanted


class SlabTable:
    """Slabs of one sequence: `table` int32 [num_layers, slabs_per_layer], read-only; `sealed` tokens per layer;
    `num_prefix_tokens`, in slabs that others share."""

    __slots__ = ("_layout", "capacity", "num_prefix_tokens", "sealed", "table")

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.table: npt.NDArray[np.int32] = np.empty((layout.num_layers, 0), np.int32)
        self.sealed = [0] * layout.num_layers
        self.capacity = 0
        self.num_prefix_tokens = 0

    def adopt(
        self, flat: Sequence[int], slabs_per_layer: int, geometry: SlabGeometry, num_slabs: int
    ) -> None:
        """Take over the table that the store sent. Raises StoreError for one that is none of an arena of so many
        slabs."""
        sent, num_layers = np.array(flat, np.int64), self._layout.num_layers
        if sent.size != num_layers * slabs_per_layer or sent.max(initial=0) >= num_slabs:
            raise StoreError(
                f"the store's reply has {sent.size} slabs up to {sent.max(initial=0)}: they are not "
                f"{slabs_per_layer} for each of {num_layers} layers, of {num_slabs}"
            )
        if self.num_prefix_tokens > slabs_per_layer * geometry.tokens_per_slab:
            raise StoreError(
                f"the store's reply shares {self.num_prefix_tokens} tokens in {slabs_per_layer} slabs of a layer"
            )
        table = sent.astype(np.int32).reshape(num_layers, slabs_per_layer)
        table.flags.writeable = False
        self.table = table
        self.capacity = slabs_per_layer * geometry.tokens_per_slab

    def cut_to_prefix(self, geometry: SlabGeometry) -> None:
        """Keep the slabs that others share only."""
        num_tokens = self.num_prefix_tokens
        num_slabs = geometry.slabs_for(num_tokens)
        self.table = self.table[:, :num_slabs]
        self.capacity = num_slabs * geometry.tokens_per_slab
        self.sealed = [min(sealed, num_tokens) for sealed in self.sealed]

    def check_put(
        self, layer: int, token_begin: int, rows: npt.NDArray[np.uint8], geometry: SlabGeometry
    ) -> None:
        """Raises InvalidStoreRequest unless rows have the layout's shape and lie in writable slabs."""
        layout, row_bytes = self._layout, self._layout.row_format.row_bytes
        shape = rows.shape
        if len(shape) != 3 or (shape[0], shape[2]) != (layout.num_kv_heads, row_bytes):
            raise InvalidStoreRequest(
                f"rows are {list(shape)}, they must be [{layout.num_kv_heads}, num_tokens, {row_bytes}]"
            )
        if rows.dtype != np.uint8:
            raise InvalidStoreRequest(f"rows are {rows.dtype}, they must be uint8")
        if not 0 <= layer < layout.num_layers:
            raise InvalidStoreRequest(f"layer {layer} is not from 0 to {layout.num_layers - 1}")
        immutable = self.sealed[layer] & ~geometry.token_mask
        if not (shape[1] >= 1 and immutable <= token_begin <= self.capacity - shape[1]):
            raise InvalidStoreRequest(
                f"{shape[1]} tokens from {token_begin} in layer {layer}: tokens below {immutable} are immutable, "
                f"tokens from {self.capacity} on are not reserved"
            )

    def readable(self, layer: int, wanted: RowsWanted) -> npt.NDArray[np.int32]:
        """The layer's slabs, to read these rows from. Raises InvalidStoreRequest for rows that are not sealed."""
        layout, positions = self._layout, wanted.positions
        if not 0 <= layer < layout.num_layers:
            raise InvalidStoreRequest(f"layer {layer} is not from 0 to {layout.num_layers - 1}")
        if not 0 <= wanted.kv_head < layout.num_kv_heads:
            raise InvalidStoreRequest(f"KV head {wanted.kv_head} is not from 0 to {layout.num_kv_heads - 1}")
        if not positions.size:
            return self.table[layer]
        lowest, highest, sealed = int(positions.min()), int(positions.max()), self.sealed[layer]
        if lowest < 0 or highest >= sealed:
            raise InvalidStoreRequest(
                f"positions {lowest} to {highest} of layer {layer} are not among the {sealed} sealed tokens of "
                f"sequence {wanted.sequence_id!r}"
            )
        return self.table[layer]


class SlabTables:
    """Slab tables of the sequences that this client has open."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._tables: dict[str, SlabTable] = {}

    def begin(self, sequence_id: str, num_prefix_tokens: int) -> SlabTable:
        """A sequence's table; a new one, which shares so many tokens, where it had none."""
        if sequence_id not in self._tables:
            table = self._tables[sequence_id] = SlabTable(self._layout)
            table.num_prefix_tokens = num_prefix_tokens
            table.sealed = [num_prefix_tokens] * self._layout.num_layers
        return self._tables[sequence_id]

    def get(self, sequence_id: str) -> SlabTable:
        """Raises NotInStore."""
        table = self._tables.get(sequence_id)
        if table is None:
            raise NotInStore(f"sequence {sequence_id!r} is not open in this client")
        return table

    def forget(self, sequence_id: str) -> None:
        self._tables.pop(sequence_id, None)

    def clear(self) -> None:
        self._tables.clear()
