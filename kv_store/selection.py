"""Selection for workers that keep no index: the store scores, and gives the rows of the best."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest
from kv_store.client.layout import Layout
from kv_store.index import ArenaKeys
from kv_store.rows import CHUNK_BYTES, GatherItem, RowReader
from kv_store.sequences import StoredIndex
from kv_store.state import StoreState
from kv_store.trainers.task import view_array

_MAX_GROUP = 1024
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TopKItem:
    """A selection of one sequence in one layer, from the candidates [token_begin, token_end).

    queries: float32 [num_kv_heads, group_size, head_dim]. resident: a bit for each candidate of each head; None: no
    rows are wanted.
    """

    sequence_id: str
    token_begin: int
    token_end: int
    k: int
    queries: bytes
    resident: bytes | None


class Selector:
    """Indexes are found under the lock and searched outside it. Tokens that have left the window since the index was
    trained are coded when they first are candidates, from their rows in the arena."""

    def __init__(self, state: StoreState, reader: RowReader) -> None:
        self._state = state
        self._reader = reader

    def chunks(
        self, epoch: int, worker_id: str, layer: int, scale: float, items: Sequence[TopKItem]
    ) -> Iterator[bytes]:
        """Positions int32 [num_kv_heads, min(k, candidates)] of each item, ascending, then the rows that the worker has
        not, item by item, head by head; in byte strings of about 1 MiB.

        Raises NotInStore, InvalidStoreRequest for a token that is not sealed or in no index.
        """
        if not math.isfinite(scale):
            raise InvalidStoreRequest(f"scale is {scale}, it must be finite")
        rows: list[GatherItem] = []
        for item in items:
            positions = self._select(epoch, worker_id, layer, scale, item)
            data = positions.astype("<i4").tobytes()
            yield from (data[begin : begin + CHUNK_BYTES] for begin in range(0, len(data), CHUNK_BYTES))
            if item.resident is not None:
                missing = _missing(item, positions)
                rows += [
                    GatherItem(item.sequence_id, layer, head, found) for head, found in enumerate(missing)
                ]
        yield from self._reader.chunks(epoch, worker_id, rows)

    def _select(self, epoch: int, worker_id: str, layer: int, scale: float, item: TopKItem) -> Positions:
        begin, end = item.token_begin, item.token_end
        with self._state.entered(epoch, worker_id) as state:
            sequence = state.sequences.get(worker_id, item.sequence_id)
            sequence.check_sealed(layer, begin, end)
            geometry = state.geometry
            queries = _queries(item, geometry.layout)
            indexes = sequence.indexes_over(layer, begin, end)
            if not all(index.kind.is_searchable for index in indexes):
                raise InvalidStoreRequest(
                    "an index of codebooks only has no codes to search: build it with them"
                )
            last, added = indexes[-1], indexes[-1].added
            first = last.known_end >> geometry.token_shift
            # From the first candidate on that no index knows yet.
            behind = sequence.table[layer, first : ((end - 1) >> geometry.token_shift) + 1].astype(np.int64)
            held = np.concatenate([np.asarray(index.slabs) for index in indexes] + [behind]).astype(np.int64)
            state.allocator.retain(held)
        begun = time.perf_counter()
        try:
            self._extend(last, added, end, behind)
            parts = [self._arrays(index, end) for index in indexes]
            found = [
                indexes[0].kind.select_head(
                    of_head, [tuple(array[head] for array in arrays) for arrays in parts], item.k, scale
                )
                for head, of_head in enumerate(queries)
            ]
            with state.lock:
                state.search_seconds.observe(time.perf_counter() - begun)
            return np.stack(found) + begin
        finally:
            with state.lock:
                state.allocator.release(held)

    def _extend(self, index: StoredIndex, added: npt.NDArray[Any] | None, end: int, slabs: Positions) -> None:
        """Have the index know the tokens below `end`; `slabs` hold those that it does not know with `added`, which was
        its own when they were found."""
        begin, geometry = replace(index, added=added).known_end, self._state.geometry
        if begin >= end:
            return
        arrays = [view_array(self._state.arena.data, ref) for ref in index.arrays]
        rows, skip = geometry.rows(self._state.arena.data), begin & geometry.token_mask
        codes = [
            index.kind.extend_head(
                ArenaKeys(rows, geometry.layout.row_format, slabs, head, skip, end - begin),
                tuple(array[head] for array in arrays),
            )
            for head in range(geometry.layout.num_kv_heads)
        ]
        before = [] if added is None else [added]
        known = np.concatenate([*before, np.stack(codes)], axis=1)
        with self._state.lock:
            # Else another call came at once, which went as far, and was first.
            if index.known_end < end:
                index.added = known

    def _arrays(self, index: StoredIndex, end: int) -> list[npt.NDArray[Any]]:
        """Return an index's arrays of all heads; the second has a row for each token below `end`."""
        fitted, of_tokens, *others = (view_array(self._state.arena.data, ref) for ref in index.arrays)
        if index.added is not None:
            of_tokens = np.concatenate([of_tokens, index.added], axis=1)
        return [fitted, of_tokens[:, : end - index.token_begin], *others]


def _queries(item: TopKItem, layout: Layout) -> npt.NDArray[np.float32]:
    heads, width = layout.num_kv_heads, layout.row_format.head_dim
    group, rest = divmod(len(item.queries), heads * width * 4)
    if rest or not 1 <= group <= _MAX_GROUP:
        raise InvalidStoreRequest(
            f"{len(item.queries)} bytes of queries are not float32 [{heads}, group, {width}]"
        )
    queries = np.frombuffer(item.queries, "<f4").reshape(heads, group, width)
    if not np.isfinite(queries).all():
        raise InvalidStoreRequest("the queries hold a NaN or an infinity")
    return queries


def _missing(item: TopKItem, positions: Positions) -> list[npt.NDArray[np.uint64]]:
    """Return for each head the positions whose rows the worker does not have."""
    heads, count = positions.shape[0], item.token_end - item.token_begin
    bits = np.frombuffer(item.resident or b"", np.uint8)
    if bits.size != -(-heads * count // 8):
        raise InvalidStoreRequest(
            f"{bits.size} bytes of `resident` are not a bit for each of {heads} x {count} tokens"
        )
    resident = np.unpackbits(bits, count=heads * count).reshape(heads, count).astype(bool)
    return [
        found[~resident[head][found - item.token_begin]].astype(np.uint64)
        for head, found in enumerate(positions)
    ]
