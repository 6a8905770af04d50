"""Every token in a slot: logical slot i holds position i."""

from __future__ import annotations

from torch import Tensor

from gpu_worker.caches.base import Cache, GroupStep
from gpu_worker.caches.whole_context import WholeContext
from gpu_worker.kernels.attention import attend_blocks
from gpu_worker.policies.base import CacheShape, Family, StepQueries
from gpu_worker.state.batch import Buckets, Group, GroupShape
from gpu_worker.state.block_tables import BlockTables
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool, num_blocks


class DenseCache(Cache):
    """Serves layers that attend everything for every sequence, or the layers of policies for sequences that attend
    everything: under a dense policy, or because the budget covers the prompt."""

    is_dense = True

    def __init__(self, shape: CacheShape, pool: SlotPool, block_tables: BlockTables) -> None:
        super().__init__(shape, block_tables)
        self._pool = pool
        self._whole = WholeContext(pool, block_tables)

    def num_blocks(self, sequence: Sequence, num_free_blocks: int) -> int:
        slots = self.num_layers * self._shape.num_kv_heads * num_blocks(sequence.num_backed)
        return slots + self._pool.blocks_of_pages(self.missing_pages(sequence, sequence.num_backed))

    def grows(self, sequence: Sequence) -> bool:
        return True

    def admit(self, sequence: Sequence) -> None:
        self.block_tables.assign(sequence.seat, sequence.num_backed)

    def store(self, sequence: Sequence, layer: int, rows: Tensor, queries: Tensor) -> None:
        self._whole.store(sequence, layer, rows[None])

    def store_layers(self, sequence: Sequence, rows: Tensor) -> None:
        self._whole.store(sequence, 0, rows)

    def group_shape(
        self, sequences: list[Sequence], num_lanes: int, num_tokens: int, buckets: Buckets
    ) -> GroupShape:
        return GroupShape("", False, num_lanes, num_tokens)

    def begin_step(self, group: Group) -> DenseStep:
        new_slots = self._whole.place(group.lanes)
        return DenseStep(self._pool.rows, self.block_tables.tables, self._shape.scale, group, new_slots)

    def count(self, sequences: list[Sequence]) -> None:
        num_layers = self.num_layers
        for sequence in sequences:
            meter = sequence.meter
            meter.num_layer_steps += num_layers
            meter.attended_tokens += num_layers * sequence.num_tokens
            is_sparse = sequence.policy.family is not Family.DENSE
            if sequence.request.measure and is_sparse and not sequence.plan.selects:
                # A sequence that attends everything misses nothing.
                meter.num_measured += num_layers
                meter.attention_mass += num_layers
                meter.recall_rate += num_layers
                meter.best_recall += num_layers


class DenseStep(GroupStep):
    def __init__(
        self, pool_rows: Tensor, tables: Tensor, scale: float, group: Group, new_slots: Tensor
    ) -> None:
        self.group = group
        self.new_slots = new_slots
        self._pool_rows = pool_rows
        self._tables = tables
        self._scale = scale
        self._lengths = (group.lanes.positions + 1)[:, None].expand(-1, tables.shape[2])

    def attend(self, layer: int, queries: StepQueries) -> Tensor:
        return attend_blocks(
            queries.own,
            self._pool_rows,
            self._tables[:, layer],
            self.group.lanes.seats,
            self._lengths,
            self._scale,
            self.group.shape.num_positions,
        )
