"""Selection by indexes that stay in the store, which also sends the rows that the device lacks."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.caches.recall.fetch import RecallFetch
from gpu_worker.caches.recall.hot_cache import HotCache
from gpu_worker.kernels.rows import pool_rows
from gpu_worker.policies.recall import Candidates
from gpu_worker.state.batch import Group
from gpu_worker.state.block_tables import BlockTables
from gpu_worker.state.slot_pool import SlotPool
from gpu_worker.store.offload import Offloader


class StoreSelection(RecallFetch):
    """Each selection is one call to the store for all sequences of a group in one layer; `fetch` follows it. The store
    trains from its own rows, and codes a token when it first is a candidate; the device has no part of an index."""

    def __init__(
        self,
        kept: tuple[int, ...],
        pool: SlotPool,
        block_tables: BlockTables,
        offloader: Offloader,
        hot: HotCache,
    ) -> None:
        """kept: the arena's number of each layer. hot: knows which rows of a sequence that may miss are in slots."""
        self._kept = kept
        self._pool = pool
        self._tables = block_tables.tables
        self._offloader = offloader
        self._hot = hot
        # That came with the last selection: [n, 2d], by sequence, head and position.
        self._rows: Tensor | None = None

    def select(self, candidates: Candidates, group: Group) -> Tensor:
        """The selection of each sequence of the group: int64 [B, H_kv, K], ascending, -1 pads. Raises
        StoreUnavailable."""
        query, layer, sequences = candidates.query, candidates.layer, group.sequences
        resident: list[Tensor | None] = [None] * len(sequences)
        if group.shape.can_miss:
            resident = [self._hot.holds(one, layer, one.plan.num_sink, one.window_begin) for one in sequences]
        found, self._rows = self._offloader.host.select(
            self._kept[layer], sequences, query, resident, candidates.scale
        )
        selected = torch.full((query.shape[0], found[0].shape[0], group.shape.num_selected), -1)
        for lane, positions in enumerate(found):
            selected[lane, :, : positions.shape[1]] = positions
        return selected.to(query.device)

    def fetch(
        self, group: Group, layer: int, positions: Tensor, slots: Tensor, missed: Tensor, found: Tensor
    ) -> Tensor:
        assert self._rows is not None, "rows come with a selection"
        pool_rows(self._tables[:, layer], group.lanes.seats, slots, found)
        is_wanted = missed & (positions >= 0)
        self._pool.rows[found[is_wanted].long()] = self._rows
        for sequence, count in zip(group.sequences, is_wanted.sum(dim=(1, 2)).tolist(), strict=False):
            self._offloader.host.count(sequence, count)
        return found
