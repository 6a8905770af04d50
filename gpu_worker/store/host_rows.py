"""Rows that pass through the host, where the device cannot reach the arena itself; and selections by the store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.row_format import row_dtype
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.extents import Extents
from gpu_worker.store.link import ArenaLink
from kv_store.client import RowsWanted, TopKWanted


class HostRows:
    """Stores and loads rows through the store's client. Raises StoreUnavailable for a silent store too: it is used in
    the middle of a step, which cannot be repeated.

    fetched_bytes: bytes of all rows that were fetched, also by the device.
    """

    def __init__(self, link: ArenaLink, extents: Extents, device: torch.device) -> None:
        self._link = link
        self._client = link.client
        self._extents = extents
        self._device = device
        self.fetched_bytes = 0

    def store(self, sequence: Sequence, layer: int, begin: int, data: npt.NDArray[np.uint8]) -> None:
        """Write the rows of a layer's tokens from `begin` on: uint8 [H_kv, n, row_bytes]."""
        self._link.call_once(lambda: self._client.put(sequence.sequence_id, layer, begin, data))

    def load(self, layer: int, items: list[RowsWanted]) -> Tensor:
        """Return the items' rows, [sum of n, 2d] on the device, in as many calls as the response slab's size needs."""
        return torch.cat(
            [self._one_call(layer, call) for call in in_calls(items, self._client.max_gather_rows)]
        )

    def load_heads(self, sequence: Sequence, layer: int, num_tokens: int, num_kv_heads: int) -> Tensor:
        """Return the first rows of every head of a layer, uncounted: [H_kv, num_tokens, 2d] on the device."""
        positions = np.arange(num_tokens, dtype=np.int64)
        items = [RowsWanted(sequence.sequence_id, head, positions) for head in range(num_kv_heads)]
        return self.load(layer, items).view(num_kv_heads, num_tokens, -1)

    def inspect(self, sequence: Sequence, layer: int, num_kv_heads: int) -> Tensor:
        """Return every past row of a layer, uncounted: [H_kv, num_tokens, 2d] on the device."""
        self._extents.seal(sequence, sequence.num_tokens)
        return self.load_heads(sequence, layer, sequence.num_tokens, num_kv_heads)

    def fetch(self, layer: int, wanted: list[tuple[Sequence, int, np.ndarray]]) -> Tensor:
        """Return rows of (sequence, KV head, positions int64 [n > 0]) in this order: [sum of n, 2d] on the device."""
        for sequence, _, positions in wanted:
            if positions.max() >= self._extents[sequence].sealed:
                self._extents.seal(sequence, sequence.num_tokens)
        items = [RowsWanted(sequence.sequence_id, head, positions) for sequence, head, positions in wanted]
        rows = self.load(layer, items)
        for sequence, _, positions in wanted:
            self.count(sequence, positions.shape[0])
        return rows

    def select(
        self,
        layer: int,
        sequences: tuple[Sequence, ...],
        query: Tensor,
        resident: list[Tensor | None],
        scale: float,
    ) -> tuple[list[Tensor], Tensor]:
        """Let the store select between sinks and window, for queries [B, H_q, d] of these sequences, by the indexes
        that it trained.

        resident: bool [H_kv, candidates], which rows the device has; None: no rows are wanted. Returns the positions
        int64 [H_kv, min(num_selected, candidates)] of each sequence, ascending, and the rows that the device has not,
        [n, 2d] on the device, by sequence, head and position.
        """
        for sequence in sequences:
            if sequence.window_begin > self._extents[sequence].sealed:
                self._extents.seal(sequence, sequence.num_tokens)
        # float32 [B, H_kv, group, d]
        grouped = query.float().unflatten(1, (self._client.layout.num_kv_heads, -1)).cpu().numpy()
        wanted = [
            TopKWanted(
                sequence.sequence_id,
                sequence.plan.num_sink,
                sequence.window_begin,
                sequence.plan.num_selected or 0,
                grouped[row],
                None if held is None else held.cpu().numpy(),
            )
            for row, (sequence, held) in enumerate(zip(sequences, resident, strict=True))
        ]
        with self._link.meter.search.timed():
            positions, rows = self._link.call_once(lambda: self._client.top_k(layer, wanted, scale))
        return [torch.from_numpy(found) for found in positions], self._to_device(rows)

    def count(self, sequence: Sequence, num_rows: int) -> None:
        """Add rows of one KV head to those that the sequence has fetched."""
        num_bytes = num_rows * self._client.layout.row_format.row_bytes
        sequence.meter.missed_rows += num_rows
        sequence.fetched_bytes += num_bytes
        self.fetched_bytes += num_bytes

    def _one_call(self, layer: int, items: list[RowsWanted]) -> Tensor:
        with self._link.meter.gather.timed():
            found = self._link.call_once(lambda: self._client.gather(layer, items))
        # The response slab is reused by the next gather: copied before the next call.
        return self._to_device(found)

    def _to_device(self, data: npt.NDArray[np.uint8]) -> Tensor:
        """Copy rows uint8 [n, row_bytes] to the device: [n, 2d]."""
        with self._link.meter.copy.timed() if len(data) else contextlib.nullcontext():
            row_format = self._client.layout.row_format
            flat = torch.from_numpy(np.array(data).ravel()).view(row_dtype(row_format))
            return flat.view(len(data), row_format.row_elements).to(self._device)


def host_bytes(rows: Tensor) -> npt.NDArray[np.uint8]:
    """Return rows [..., 2d] as the arena holds them: uint8 [..., row_bytes], on a CPU the same memory."""
    return rows.view(torch.uint8).cpu().numpy()


def in_calls(items: list[RowsWanted], max_rows: int) -> Iterator[list[RowsWanted]]:
    """Yield the items in order, cut into calls of at most `max_rows` rows."""
    call: list[RowsWanted] = []
    num_left = max_rows
    for item in items:
        positions = item.positions
        while len(positions) > num_left:
            call.append(RowsWanted(item.sequence_id, item.kv_head, positions[:num_left]))
            yield call
            positions, call, num_left = positions[num_left:], [], max_rows
        if len(positions):
            call.append(RowsWanted(item.sequence_id, item.kv_head, positions))
            num_left -= len(positions)
    if call:
        yield call
