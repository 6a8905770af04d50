"""Every token in a slot: logical slot i holds position i."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.engine.caches.base import Cache, Group
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.slot_pool import BlockTables, SlotPool, physical_slots
from gpu_worker.kernels.attention import attend_blocks
from gpu_worker.kernels.attention.reference import BLOCK_SIZE


class DenseCache(Cache):
    def __init__(self, pool: SlotPool, block_tables: BlockTables, scale: float) -> None:
        self._pool = pool
        self._block_tables = block_tables
        self._scale = scale

    def num_slots(self, sequence: Sequence, num_free_slots: int) -> int:
        return sequence.capacity

    def admit(self, sequence: Sequence, layer: int) -> None:
        self._block_tables.assign(sequence.seat, layer, sequence.capacity)

    def store(self, sequence: Sequence, layer: int, rows: Tensor) -> None:
        num_kv_heads, num_tokens, _ = rows.shape
        slots = torch.arange(num_tokens, device=rows.device).expand(num_kv_heads, num_tokens)
        self._pool.rows[physical_slots(self._block_tables.tables[sequence.seat, layer], slots)] = rows

    def append(self, layer: int, group: Group, rows: Tensor) -> None:
        slots = group.positions[:, None, None].expand(-1, rows.shape[1], 1)
        tables = self._block_tables.tables[group.seats, layer]
        self._pool.rows[physical_slots(tables, slots)[..., 0]] = rows

    def attend(self, layer: int, group: Group, query: Tensor) -> Tensor:
        lengths = group.positions + 1
        num_blocks = -(-max(sequence.num_tokens + 1 for sequence in group.sequences) // BLOCK_SIZE)
        tables = self._block_tables.tables[group.seats, layer, :, :num_blocks]
        for sequence in group.sequences:
            sequence.meter.num_layer_steps += 1
            sequence.meter.attended_tokens += sequence.num_tokens
        expanded = lengths[:, None].expand(-1, tables.shape[1])
        return attend_blocks(query, self._pool.rows, tables, expanded, self._scale)

    def release(self, sequence: Sequence, layer: int) -> None:
        self._block_tables.release(sequence.seat, layer)
