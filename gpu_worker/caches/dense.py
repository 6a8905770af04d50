"""Every token in a slot: logical slot i holds position i."""

from __future__ import annotations

from torch import Tensor

from gpu_worker.caches.base import Cache, GroupStep
from gpu_worker.caches.whole_context import WholeContext
from gpu_worker.kernels.attention import attend_blocks
from gpu_worker.policies.base import Family, StepQueries
from gpu_worker.state.batch import Buckets, Group, GroupShape
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import BlockTables, SlotPool, num_blocks


class DenseCache(Cache):
    """Serves sequences that attend everything: dense policies, dense layers, and recall whose budget covers the
    prompt."""

    is_dense = True

    def __init__(self, pool: SlotPool, block_tables: BlockTables, scale: float) -> None:
        self._pool = pool
        self._block_tables = block_tables
        self._whole = WholeContext(pool, block_tables)
        self._scale = scale

    def num_blocks(self, sequence: Sequence, num_layers: int, num_free_blocks: int) -> int:
        return num_layers * self._block_tables.tables.shape[2] * num_blocks(sequence.num_grown_slots)

    def admit(self, sequence: Sequence, layers: range) -> None:
        self._block_tables.assign(sequence.seat, layers, sequence.num_grown_slots)

    def store(self, sequence: Sequence, layer: int, rows: Tensor, queries: Tensor) -> None:
        self._whole.store(sequence, range(layer, layer + 1), rows[None])

    def store_layers(self, sequence: Sequence, layers: range, rows: Tensor) -> None:
        self._whole.store(sequence, layers, rows)

    def advance(self, sequence: Sequence, layers: range) -> None:
        return None

    def group_shape(
        self, sequences: list[Sequence], num_lanes: int, num_tokens: int, buckets: Buckets
    ) -> GroupShape:
        return GroupShape("", False, num_lanes, num_tokens)

    def begin_step(self, group: Group, layers: range) -> DenseStep:
        new_slots = self._whole.place(group.lanes, layers)
        return DenseStep(self._pool.rows, self._block_tables.tables, self._scale, group, new_slots)

    def count(self, sequences: list[Sequence], layers: range) -> None:
        num_layers = len(layers)
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

    def release(self, sequence: Sequence, layers: range) -> None:
        self._block_tables.release(sequence.seat, layers)


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
