"""The rows that an arena holds, and where a row lies within a slab."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest
from kv_store.client.row_format import RowFormat

LAYOUT_VERSION = 2
MAX_LAYERS = 1024
MAX_KV_HEADS = 1024


@dataclass(frozen=True, slots=True)
class Layout:
    """Number and format of a token's rows. Raises InvalidStoreRequest for a number out of range."""

    num_layers: int
    num_kv_heads: int
    row_format: RowFormat

    def __post_init__(self) -> None:
        limits = {"num_layers": MAX_LAYERS, "num_kv_heads": MAX_KV_HEADS}
        for name, limit in limits.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise InvalidStoreRequest(f"layout: {name} is {value}, it must be from 1 to {limit}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, all KV heads."""
        return self.num_kv_heads * self.row_format.row_bytes


class SlabGeometry:
    """Cuts slabs of `slab_bytes` into `[kv_head][token][K|V]` for one layout.

    `tokens_per_slab` is the largest power of two that fits. Raises InvalidStoreRequest when not one token fits.
    """

    def __init__(self, layout: Layout, slab_bytes: int) -> None:
        fitting = slab_bytes // layout.token_bytes
        if fitting < 1:
            raise InvalidStoreRequest(
                f"a token of one layer takes {layout.token_bytes} bytes, a slab has {slab_bytes}: "
                "start the store with a larger --slab-bytes"
            )
        self.layout = layout
        self.slab_bytes = slab_bytes
        self.token_shift = fitting.bit_length() - 1
        self.tokens_per_slab = 1 << self.token_shift
        self.token_mask = self.tokens_per_slab - 1

    def slabs_for(self, num_tokens: int) -> int:
        """Slabs a layer needs for `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_slab)

    def rows(self, arena: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The whole arena as uint8 [num_slabs, num_kv_heads, tokens_per_slab, row_bytes], without a copy."""
        row_bytes = self.layout.row_format.row_bytes
        shape = (arena.size // self.slab_bytes, self.layout.num_kv_heads, self.tokens_per_slab, row_bytes)
        strides = (self.slab_bytes, self.tokens_per_slab * row_bytes, row_bytes, 1)
        view = np.ndarray(shape, np.uint8, buffer=arena, strides=strides)
        view.flags.writeable = arena.flags.writeable
        return view

    def row_items(self, arena: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
        """The same rows with each row one item, void [num_slabs, num_kv_heads, tokens_per_slab].

        Picking rows by number copies an item at once instead of byte by byte.
        """
        return self.rows(arena).view(f"V{self.layout.row_format.row_bytes}")[..., 0]
