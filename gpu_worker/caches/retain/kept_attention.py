"""Attention of a retain step over what is kept, and its policy's access to the slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.caches.probe import Probe
from gpu_worker.caches.retain.kept_slots import KeptSlots
from gpu_worker.kernels.attention import attend_blocks
from gpu_worker.kernels.rows import pool_rows
from gpu_worker.kernels.slot_weights import slot_weights
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.retain import KeptStep
from gpu_worker.state.batch import Group
from gpu_worker.state.block_tables import BlockTables
from gpu_worker.state.lane_inputs import LaneInputs
from gpu_worker.state.slot_pool import SlotPool


@dataclass(frozen=True, slots=True)
class RetainParts:
    """The parts that every retain step uses."""

    shape: CacheShape
    pool: SlotPool
    block_tables: BlockTables
    kept: KeptSlots
    probe: Probe

    def pool_rows(self, rows: LaneInputs, slots: Tensor) -> Tensor:
        """Pool rows of slots int64 [B, L, H_kv, R]: int32 alike, -1 for -1 and for padding."""
        tables = self.block_tables.tables.flatten(1, 2)
        asked = slots.flatten(1, 2).where((rows.positions >= 0)[:, None, None], -1)
        found = torch.empty(asked.shape, dtype=torch.int32, device=asked.device)
        pool_rows(tables, rows.seats, asked, found)
        return found.view(slots.shape)


class KeptAttention(KeptStep):
    """Over block tables, each head's own length."""

    def __init__(self, group: Group, lengths: Tensor, parts: RetainParts) -> None:
        self._rows = group.lanes
        self._lengths = lengths
        self._longest = group.shape.num_positions
        self._parts = parts

    def attend_kept(self, layer: int, query: Tensor, bias: Tensor | None = None) -> Tensor:
        pool, scale = self._parts.pool.rows, self._parts.shape.scale
        tables, lengths = self._at(layer)
        return attend_blocks(query, pool, tables, self._rows.seats, lengths, scale, self._longest, bias)

    def notes(self, layer: int) -> Tensor:
        notes = self._parts.kept.notes
        assert notes is not None, "a policy that reads notes keeps some"
        return notes[:, layer]

    def observe(self, layer: int, query: Tensor, note: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        pool, scale = self._parts.pool.rows, self._parts.shape.scale
        tables, lengths = self._at(layer)
        weights = slot_weights(query, pool, tables, self._rows.seats, lengths, scale, self._longest)
        self._parts.kept.change_notes(
            self._rows, layer, weights.shape[2], lambda notes: note(notes, weights, self._rows.marks)
        )

    def _at(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's block tables and lengths."""
        return self._parts.block_tables.tables[:, layer], self._lengths[:, layer]
