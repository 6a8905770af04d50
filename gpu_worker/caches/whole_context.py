"""The slots of a fully resident sequence: slot i holds position i, and nothing misses."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.kernels.rows import pool_rows, store_prompt
from gpu_worker.state.block_tables import BlockTables, physical_slots
from gpu_worker.state.lane_inputs import LaneInputs
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool


class WholeContext:
    """Keeps no state: positions are slots."""

    def __init__(self, pool: SlotPool, block_tables: BlockTables) -> None:
        self._pool = pool
        self._tables = block_tables.tables

    def store(self, sequence: Sequence, first: int, rows: Tensor) -> None:
        """Fill the slots of prefilled layers, from the `first` on. rows: [L, H_kv, n, 2d]."""
        store_prompt(rows, self._pool.rows, self._tables, sequence.seat, first)

    def rows_of(self, sequence: Sequence, layers: range, positions: Tensor) -> Tensor:
        """Pool rows of the layers' positions int64 [T], in every head: int64 [layers, H_kv, T]."""
        tables = self._tables[sequence.seat, layers.start : layers.stop]
        return physical_slots(tables, positions.expand(*tables.shape[:2], -1))

    def place(self, rows: LaneInputs) -> Tensor:
        """Pool rows of the new tokens: int32 [B, L, H_kv], -1 for padding."""
        tables = self._tables.flatten(1, 2)
        positions = rows.positions[:, None, None].expand(-1, tables.shape[1], 1)
        placed = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
        pool_rows(tables, rows.seats, positions, placed)
        return placed.view(positions.shape[0], *self._tables.shape[1:3])

    def find(self, rows: LaneInputs, layer: int, positions: Tensor, found: Tensor | None = None) -> Tensor:
        """Pool rows of selected positions int64 [B, H_kv, K]: int32, -1 stays -1; in `found`, if given."""
        if found is None:
            found = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
        pool_rows(self._tables[:, layer], rows.seats, positions, found)
        return found
