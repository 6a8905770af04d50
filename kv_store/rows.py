"""Rows into the arena and out of it, for workers that do not do so themselves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest, StaleEpoch
from kv_store.client.layout import SlabGeometry
from kv_store.sequences import Sequence
from kv_store.state import StoreState

CHUNK_BYTES = 1 << 20
Slabs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GatherItem:
    """Rows of one head of one layer that one sequence wants; `positions` uint64 [num_rows], in this order."""

    sequence_id: str
    layer: int
    kv_head: int
    positions: npt.NDArray[np.uint64]


class RowReader:
    """Reads sealed rows. Addresses are resolved under the lock, bytes are copied outside it."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def gather(self, epoch: int, worker_id: str, items: Items[GatherItem]) -> tuple[int, int]:
        """Copy rows, item by item, to the start of the worker's response segment; returns (offset, num_rows).

        Raises NotInStore, StaleEpoch, InvalidStoreRequest for a position that is not sealed or more rows than the
        segment holds.
        """
        state = self._state
        with state.lock:
            worker = state.enter(epoch, worker_id)
        with worker.gather_lock:
            with state.lock:
                if state.enter(epoch, worker_id) is not worker:
                    raise StaleEpoch(f"worker {worker_id!r} has attached again: what it held is lost")
                rows, addresses = self._resolve(worker_id, items)
                num_rows, offset = len(addresses[0]), worker.response_slabs.start * state.slab_bytes
                most = len(worker.response_slabs) * state.slab_bytes // rows.itemsize
                if num_rows > most:
                    raise InvalidStoreRequest(f"{num_rows} rows asked for, the response segment holds {most}")
                held = np.concatenate([np.unique(addresses[0]), np.asarray(worker.response_slabs, np.int64)])
                state.allocator.retain(held)
            with self._reading(held):
                target = state.arena.data[offset : offset + num_rows * rows.itemsize].view(rows.dtype)
                begun = time.perf_counter()
                target[:] = rows[addresses]
                self._count(num_rows, time.perf_counter() - begun)
        return offset, num_rows

    def chunks(self, epoch: int, worker_id: str, items: Items[GatherItem]) -> Iterator[bytes]:
        """Yield the same rows as byte strings of about 1 MiB. Raises as `gather` does, before the first chunk."""
        with self._state.entered(epoch, worker_id) as state:
            rows, (slabs, heads, tokens) = self._resolve(worker_id, items)
            held = np.unique(slabs)
            state.allocator.retain(held)
        with self._reading(held):
            step, seconds = max(1, CHUNK_BYTES // rows.itemsize), 0.0
            for begin in range(0, slabs.size, step):
                part, begun = slice(begin, begin + step), time.perf_counter()
                some = rows[slabs[part], heads[part], tokens[part]]
                seconds += time.perf_counter() - begun
                yield some.tobytes()
            self._count(slabs.size, seconds)

    @contextlib.contextmanager
    def _reading(self, held: Slabs) -> Iterator[None]:
        """Release retained slabs at the end."""
        try:
            yield
        finally:
            with self._state.lock:
                self._state.allocator.release(held)

    def _count(self, num_rows: int, seconds: float) -> None:
        if num_rows:
            with self._state.lock:
                self._state.counters.gathered_rows += num_rows
                self._state.gather_seconds.observe(seconds)

    def _resolve(
        self, worker_id: str, items: Items[GatherItem]
    ) -> tuple[npt.NDArray[np.void], tuple[Slabs, Slabs, Slabs]]:
        """Return all rows of the arena and checked addresses in them: slabs, heads and tokens, int64 [num_rows]."""
        geometry = self._state.geometry
        found = [np.empty((3, 0), np.int64)]
        for item in items:
            sequence = self._state.sequences.get(worker_id, item.sequence_id)
            # Before they are int64: a huge position must not wrap to a small one.
            table = sequence.readable(item.layer, item.kv_head, item.positions)
            positions = item.positions.astype(np.int64)
            slabs = table[positions >> geometry.token_shift].astype(np.int64)
            heads = np.full(slabs.size, item.kv_head, np.int64)
            found.append(np.stack([slabs, heads, positions & geometry.token_mask]))
        slabs, heads, tokens = np.concatenate(found, axis=1)
        return geometry.row_items(self._state.arena.data), (slabs, heads, tokens)


@dataclass(frozen=True, slots=True)
class PutTarget:
    """Where a stream of `[kv_head][token][K|V]` goes."""

    sequence_id: str
    layer: int
    token_begin: int
    num_tokens: int


class RowWriter:
    """Writes rows into reserved slabs that are not yet immutable."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def put(self, epoch: int, worker_id: str, target: PutTarget, pieces: Iterable[bytes]) -> None:
        """Write the whole stream. The same stream again writes the same bytes; nothing is visible before Seal.

        Raises NotInStore, InvalidStoreRequest for a range that is not writable or a stream too short or too long.
        """
        with self._state.entered(epoch, worker_id) as state:
            sequence = state.sequences.get(worker_id, target.sequence_id)
            sequence.check_writable(target.layer, target.token_begin, target.num_tokens)
            geometry = state.geometry
            shift = geometry.token_shift
            first = target.token_begin >> shift
            last = (target.token_begin + target.num_tokens - 1) >> shift
            slabs = sequence.table[target.layer, first : last + 1].copy()
            spans = list(_spans(sequence, geometry, target))
            # Within the same hold of the lock: a Release in between would give the slabs to someone else.
            state.allocator.retain(slabs)
        try:
            self._fill(spans, pieces)
        finally:
            with state.lock:
                state.allocator.release(slabs)

    def _fill(self, spans: list[tuple[int, int]], pieces: Iterable[bytes]) -> None:
        data = self._state.arena.data
        total = sum(num_bytes for _, num_bytes in spans)
        received = 0
        remaining = iter(spans)
        offset, room = 0, 0
        for piece in pieces:
            source = np.frombuffer(piece, np.uint8)
            received += source.size
            if received > total:
                raise InvalidStoreRequest(f"more than the {total} bytes announced were sent")
            while source.size:
                if room == 0:
                    offset, room = next(remaining)
                count = min(room, source.size)
                data[offset : offset + count] = source[:count]
                offset, room, source = offset + count, room - count, source[count:]
        if received != total:
            raise InvalidStoreRequest(f"{received} of the {total} bytes announced were sent")


def _spans(sequence: Sequence, geometry: SlabGeometry, target: PutTarget) -> Iterator[tuple[int, int]]:
    """(offset, num_bytes) of each contiguous destination, in the stream's order."""
    row_bytes = geometry.layout.row_format.row_bytes
    end = target.token_begin + target.num_tokens
    for head in range(geometry.layout.num_kv_heads):
        token = target.token_begin
        while token < end:
            slab = int(sequence.table[target.layer, token >> geometry.token_shift])
            within = token & geometry.token_mask
            count = min(end - token, geometry.tokens_per_slab - within)
            row = head * geometry.tokens_per_slab + within
            yield slab * geometry.slab_bytes + row * row_bytes, count * row_bytes
            token += count
