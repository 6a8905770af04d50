"""The worker's side of the arena: rows out, rows back, indexes trained; store errors become the worker's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gpu_worker.engine.sequence import Sequence
from gpu_worker.errors import CapacityError, StoreUnavailable, WorkerError
from gpu_worker.policies.base import IndexJob
from kv_store.client import (
    HandoffRefused,
    IndexSegment,
    RowsWanted,
    StaleEpoch,
    StoreClient,
    StoreError,
    StoreFull,
    StoreUnreachable,
)

Result = TypeVar("Result")

# After one of these the attachment is gone, with all that it held; any other error concerns one request.
LOST = (StoreUnreachable, StaleEpoch, HandoffRefused)


@dataclass(frozen=True, slots=True)
class TrainedLayer:
    """An index that is being built: `future` gives the segment of `layer`."""

    layer: int
    job: IndexJob
    future: Future[IndexSegment]


@dataclass(slots=True)
class _Extent:
    """Tokens that a sequence may write to the store, and those of them that it may read."""

    reserved: int = 0
    sealed: int = 0


class Offloader:
    """Moves rows between the device and the arena. Every method may raise StoreUnavailable."""

    def __init__(
        self, client: StoreClient, num_layers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._client = client
        self._num_layers = num_layers
        self._dtype = dtype
        self._device = device
        self._extents: dict[str, _Extent] = {}
        self.is_reachable = True
        self.offloaded_bytes = 0
        self.fetched_bytes = 0

    @property
    def transport(self) -> str:
        return self._client.transport

    def open(self, sequence: Sequence, num_tokens: int) -> None:
        """Start a sequence with room for `num_tokens`. Raises CapacityError that names the missing bytes.

        After a failure or a restart of the store this attaches anew: then what earlier sequences held is lost
        (`holds`).
        """
        self._call(lambda: self._begin(sequence.sequence_id))
        self._extents[sequence.sequence_id] = _Extent()
        try:
            self._reserve(sequence, num_tokens)
        except WorkerError:
            self.release(sequence)
            raise

    def _begin(self, sequence_id: str) -> None:
        if self.is_reachable:
            try:
                self._client.open_sequence(sequence_id)
                return
            except StaleEpoch:
                # It answers, as a new start that holds nothing of ours; this request has lost nothing.
                self.is_reachable = False
        self._client.reattach()
        self._extents.clear()
        self.is_reachable = True
        self._client.open_sequence(sequence_id)

    def holds(self, sequence: Sequence) -> bool:
        """Whether the store has the sequence's rows; false once it was attached anew."""
        return sequence.sequence_id in self._extents

    def _reserve(self, sequence: Sequence, num_tokens: int) -> None:
        self._call(lambda: self._client.reserve(sequence.sequence_id, num_tokens))
        per_slab = self._client.tokens_per_slab
        self._extents[sequence.sequence_id].reserved = -(-num_tokens // per_slab) * per_slab

    def put_layer(self, sequence: Sequence, layer: int, rows: Tensor) -> None:
        """Write and seal a prefilled layer. rows: [H_kv, n, 2d]."""
        data = host_bytes(rows)
        self._call(lambda: self._client.put(sequence.sequence_id, layer, 0, data))
        self._call(
            lambda: self._client.seal(
                sequence.sequence_id, rows.shape[1], layer_begin=layer, layer_end=layer + 1
            )
        )
        self._extents[sequence.sequence_id].sealed = rows.shape[1]
        self.offloaded_bytes += data.nbytes

    def put_token(self, sequence: Sequence, position: int, data: np.ndarray) -> None:
        """Write one token of every layer, and seal at every full slab. data: uint8 [L, H_kv, row_bytes]."""
        if position >= self._extents[sequence.sequence_id].reserved:
            self._reserve(sequence, position + 1)
        for layer in range(self._num_layers):
            at_layer = data[layer][:, None]
            self._call(lambda: self._client.put(sequence.sequence_id, layer, position, at_layer))  # noqa: B023
        if (position + 1) % self._client.tokens_per_slab == 0:
            self.seal(sequence, position + 1)
        self.offloaded_bytes += data.nbytes

    def seal(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the tokens below `num_tokens` be read; nothing is asked where they already may."""
        extent = self._extents[sequence.sequence_id]
        if num_tokens > extent.sealed:
            self._call(lambda: self._client.seal(sequence.sequence_id, num_tokens))
            extent.sealed = num_tokens

    def build(self, sequence: Sequence, layer: int, job: IndexJob) -> TrainedLayer:
        """Ask for an index over sealed rows; returns at once."""
        seed = sequence.request.sampling.seed or 0
        future = self._call(
            lambda: self._client.build_index(
                sequence.sequence_id, layer, job.begin, job.end, job.params, seed=seed
            )
        )
        return TrainedLayer(layer, job, future)

    def segment(self, trained: TrainedLayer, timeout_seconds: float) -> IndexSegment | None:
        """The trained segment, or None if it is not ready within the time."""
        try:
            segment = self._call(lambda: trained.future.result(timeout_seconds))
        except FutureTimeout:
            segment = None
        # Once the lease is lost no index comes any more, and the slabs of one that came may be another's.
        self._call(self._client.check)
        return segment

    def fetch(self, layer: int, wanted: list[tuple[Sequence, int, np.ndarray]]) -> Tensor:
        """Rows of (sequence, KV head, positions int64 [n > 0]) in this order: [sum of n, 2d] on the device."""
        for sequence, _, positions in wanted:
            if positions.max() >= self._extents[sequence.sequence_id].sealed:
                self.seal(sequence, sequence.num_tokens)
        items = [RowsWanted(sequence.sequence_id, head, positions) for sequence, head, positions in wanted]
        rows = self._gather(layer, items)
        row_bytes = rows.shape[1] * rows.element_size()
        for sequence, _, positions in wanted:
            sequence.fetched_bytes += positions.shape[0] * row_bytes
        self.fetched_bytes += rows.shape[0] * row_bytes
        return rows

    def inspect(self, sequence: Sequence, layer: int, num_kv_heads: int) -> Tensor:
        """Every past row of a layer, uncounted: [H_kv, num_tokens, 2d] on the device."""
        self.seal(sequence, sequence.num_tokens)
        positions = np.arange(sequence.num_tokens, dtype=np.int64)
        items = [RowsWanted(sequence.sequence_id, head, positions) for head in range(num_kv_heads)]
        return self._gather(layer, items).view(num_kv_heads, sequence.num_tokens, -1)

    def _gather(self, layer: int, items: list[RowsWanted]) -> Tensor:
        """The items' rows, in as many calls as the response slab's size asks for."""
        parts = []
        for call in _calls(items, self._client.max_gather_rows):
            data = self._call(lambda: self._client.gather(layer, call))  # noqa: B023
            # The response slab is reused by the next gather: copy before anyone can ask for it.
            parts.append(torch.from_numpy(np.array(data)).view(self._dtype))
        return torch.cat(parts).to(self._device)

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's slabs at once; a store that is gone holds nothing any more."""
        if self._extents.pop(sequence.sequence_id, None) is None:
            return
        try:
            self._call(lambda: self._client.release(sequence.sequence_id))
        except StoreUnavailable:
            self.is_reachable = False

    def close(self) -> None:
        self._client.close()

    def _call(self, operation: Callable[[], Result]) -> Result:
        try:
            return operation()
        except StoreFull as error:
            raise CapacityError(f"the KV store is full: {error}") from error
        except StoreError as error:
            if isinstance(error, LOST):
                self.is_reachable = False
            raise StoreUnavailable(f"the KV store failed while the request ran: {error}") from error


def host_bytes(rows: Tensor) -> np.ndarray:
    """Rows [..., 2d] as the arena holds them: uint8 [..., row_bytes]."""
    return rows.contiguous().view(torch.uint8).cpu().numpy()


def _calls(items: list[RowsWanted], max_rows: int) -> Iterator[list[RowsWanted]]:
    """The items in order, cut into calls of at most `max_rows` rows."""
    call: list[RowsWanted] = []
    room = max_rows
    for item in items:
        positions = item.positions
        while len(positions) > room:
            call.append(RowsWanted(item.sequence_id, item.kv_head, positions[:room]))
            yield call
            positions, call, room = positions[room:], [], max_rows
        if len(positions):
            call.append(RowsWanted(item.sequence_id, item.kv_head, positions))
            room -= len(positions)
    if call:
        yield call
