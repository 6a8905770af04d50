"""Rows of the arena on their way through the host, and what the store selects; counted by sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from gpu_worker.state.sequence import Sequence
from gpu_worker.store.host_path import HostPath
from gpu_worker.store.kv_meter import KVMeter
from gpu_worker.store.link import Extent, StoreLink
from kv_store.client import RowsWanted, StoreClient, TopKWanted


class StoreReads:
    """fetched_bytes: of rows, by whatever way. Every method but `count` may raise StoreUnavailable."""

    def __init__(
        self,
        client: StoreClient,
        link: StoreLink,
        host: HostPath,
        extents: Mapping[str, Extent],
        meter: KVMeter,
        seal: Callable[[Sequence, int], None],
    ) -> None:
        """seal: makes a sequence's first tokens readable."""
        self._client = client
        self._link = link
        self._host = host
        self._extents = extents
        self._meter = meter
        self._seal = seal
        self.fetched_bytes = 0

    def fetch(self, layer: int, wanted: list[tuple[Sequence, int, np.ndarray]]) -> Tensor:
        """Rows of (sequence, KV head, positions int64 [n > 0]) in this order: [sum of n, 2d] on the device."""
        for sequence, _, positions in wanted:
            if positions.max() >= self._extents[sequence.sequence_id].sealed:
                self._seal(sequence, sequence.num_tokens)
        items = [RowsWanted(sequence.sequence_id, head, positions) for sequence, head, positions in wanted]
        rows = self._host.gather(layer, items)
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
            if sequence.window_begin > self._extents[sequence.sequence_id].sealed:
                self._seal(sequence, sequence.num_tokens)
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
        with self._meter.search.timed():
            positions, rows = self._link.call_once(lambda: self._client.top_k(layer, wanted, scale))
        return [torch.from_numpy(found) for found in positions], self._host.rows(rows)

    def count(self, sequence: Sequence, num_rows: int) -> None:
        """Add rows of one KV head to what the sequence has fetched."""
        num_bytes = num_rows * self._client.layout.row_format.row_bytes
        sequence.meter.missed_rows += num_rows
        sequence.fetched_bytes += num_bytes
        self.fetched_bytes += num_bytes

    def inspect(self, sequence: Sequence, layer: int, num_kv_heads: int) -> Tensor:
        """Every past row of a layer, uncounted: [H_kv, num_tokens, 2d] on the device."""
        self._seal(sequence, sequence.num_tokens)
        positions = np.arange(sequence.num_tokens, dtype=np.int64)
        items = [RowsWanted(sequence.sequence_id, head, positions) for head in range(num_kv_heads)]
        return self._host.gather(layer, items).view(num_kv_heads, sequence.num_tokens, -1)
