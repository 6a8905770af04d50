"""Every token in a slot: logical slot i holds position i."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.engine.caches.base import Cache, Group, GroupStep
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

    def begin_step(self, group: Group, layers: range) -> DenseStep:
        return DenseStep(self._pool, self._block_tables, self._scale, group, layers)

    def release(self, sequence: Sequence, layer: int) -> None:
        self._block_tables.release(sequence.seat, layer)


class DenseStep(GroupStep):
    def __init__(
        self, pool: SlotPool, block_tables: BlockTables, scale: float, group: Group, layers: range
    ) -> None:
        self.group = group
        self._pool = pool
        self._scale = scale
        self._first_layer = layers.start
        lengths = [sequence.num_tokens + 1 for sequence in group.sequences]
        self._longest = max(lengths)
        self._is_padded = min(lengths) < self._longest
        num_blocks = -(-self._longest // BLOCK_SIZE)
        # [B, layers, H_kv, blocks]
        self._tables = block_tables.tables[group.seats, layers.start : layers.stop, :, :num_blocks]
        num_kv_heads = self._tables.shape[2]
        self._lengths = (group.positions + 1)[:, None].expand(-1, num_kv_heads)
        newest = group.positions[:, None, None, None].expand(*self._tables.shape[:3], 1)
        self._new_slots = physical_slots(self._tables, newest)[..., 0]

    def append(self, layer: int, rows: Tensor) -> None:
        self._pool.rows[self._new_slots[:, layer - self._first_layer]] = rows

    def attend(self, layer: int, query: Tensor) -> Tensor:
        for sequence in self.group.sequences:
            sequence.meter.num_layer_steps += 1
            sequence.meter.attended_tokens += sequence.num_tokens
        tables = self._tables[:, layer - self._first_layer]
        return attend_blocks(
            query, self._pool.rows, tables, self._lengths, self._scale, self._longest, self._is_padded
        )
