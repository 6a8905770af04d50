"""Rows into the arena for a worker that cannot map it: a byte stream cut anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kv_store.client.layout import SlabGeometry
from kv_store.errors import InvalidArgument
from kv_store.sequences import Sequence
from kv_store.state import StoreState


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

        Raises NotFound, InvalidArgument for a range that is not writable or a stream too short or too long.
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
                raise InvalidArgument(f"more than the {total} bytes announced were sent")
            while source.size:
                if room == 0:
                    offset, room = next(remaining)
                count = min(room, source.size)
                data[offset : offset + count] = source[:count]
                offset, room, source = offset + count, room - count, source[count:]
        if received != total:
            raise InvalidArgument(f"{received} of the {total} bytes announced were sent")


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
