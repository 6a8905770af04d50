"""A sum of every sealed row, with `--verify-reads`: rows are compared with them each time that they are gathered."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kv_store.client.layout import SlabGeometry

# Odd: a word that differs always differs in the sum, too.
_SEED = 0x5EED


class RowSums:
    """Sums of 32-bit words by odd weights mod 2**32, uint32 [num_slabs, num_kv_heads, tokens_per_slab]. Not
    thread-safe: the store's lock guards it.

    arena: uint8 [num_slabs * slab_bytes].
    """

    def __init__(self, arena: npt.NDArray[np.uint8], geometry: SlabGeometry) -> None:
        rows = geometry.rows(arena)
        self._tokens_per_slab = geometry.tokens_per_slab
        self._rows = rows.view(np.uint32)
        self._sums = np.zeros(rows.shape[:3], np.uint32)
        draw = np.random.default_rng(_SEED).integers(0, 1 << 31, self._rows.shape[3], np.uint32)
        self._weights = draw * np.uint32(2) + np.uint32(1)

    def take(self, slab_ids: npt.NDArray[np.int32], num_known: int = 0) -> None:
        """Of all rows of these slabs as they are now, but for so many first tokens of the first one: what became of
        those since is not to be taken for right. Sums of rows that are not sealed yet mean nothing."""
        for slab in slab_ids:
            rows, sums = self._rows[slab, :, num_known:], self._sums[slab, :, num_known:]
            np.einsum("htw,w->ht", rows, self._weights, out=sums)
            num_known = 0

    def corrupt(self, slab_ids: npt.NDArray[np.int32], num_tokens: int) -> npt.NDArray[np.int32]:
        """Those of these slabs of which one of the first `num_tokens` tokens, all sealed, is not what it was."""
        per_slab, found = self._tokens_per_slab, []
        for place, slab in enumerate(slab_ids):
            count = min(per_slab, num_tokens - place * per_slab)
            sums = np.einsum("htw,w->ht", self._rows[slab, :, :count], self._weights)
            if (sums != self._sums[slab, :, :count]).any():
                found.append(slab)
        return np.array(found, np.int32)

    def differing(
        self,
        rows: npt.NDArray[np.uint8],
        slabs: npt.NDArray[np.int64],
        heads: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int32]:
        """The distinct slabs from which rows uint8 [n, row_bytes] came otherwise than they were sealed. slabs, heads,
        tokens: int64 [n], where each row came from."""
        sums = np.einsum("nw,w->n", rows.view(np.uint32), self._weights)
        differs = sums != self._sums[slabs, heads, tokens]
        return np.unique(slabs[differs]).astype(np.int32)
