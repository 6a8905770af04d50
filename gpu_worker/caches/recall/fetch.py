"""Fetches rows that the hot cache misses."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from gpu_worker.kernels.rows import fetch_misses, pool_rows
from gpu_worker.state.batch import Group
from gpu_worker.state.block_tables import BlockTables
from gpu_worker.state.slot_pool import SlotPool
from gpu_worker.store.arena import ArenaView
from gpu_worker.store.offload import Offloader


class RecallFetch(ABC):
    """Fills the slots that misses took, and gives the pool rows of all selected tokens.

    arena: what the device reads rows from; None where the host takes part.
    """

    arena: ArenaView | None = None

    @abstractmethod
    def fetch(
        self, group: Group, layer: int, positions: Tensor, slots: Tensor, missed: Tensor, found: Tensor
    ) -> Tensor:
        """Pool rows of `slots`, in `found` int32 [B, H_kv, K], -1 stays -1, once missed rows are in theirs.

        positions, slots: int64 [B, H_kv, K], missed: bool, as the hot cache resolved them. Raises StoreUnavailable.
        """


class ArenaFetch(RecallFetch):
    """The kernel that finds a miss reads the row from the arena itself, and adds it to `fetched`, int64 [seats]."""

    arena: ArenaView

    def __init__(
        self,
        arena: ArenaView,
        kept: tuple[int, ...],
        pool: SlotPool,
        block_tables: BlockTables,
        fetched: Tensor,
    ) -> None:
        """kept: the arena's number of each layer."""
        self.arena = arena
        self._kept = kept
        self._pool = pool
        self._tables = block_tables.tables
        self._fetched = fetched

    def fetch(
        self, group: Group, layer: int, positions: Tensor, slots: Tensor, missed: Tensor, found: Tensor
    ) -> Tensor:
        arena = self.arena
        fetch_misses(
            arena.bytes,
            arena.layout,
            arena.slab_tables[:, self._kept[layer]],
            self._tables[:, layer],
            group.lanes.seats,
            positions,
            slots,
            missed,
            self._pool.rows,
            found,
            self._fetched,
        )
        return found


class StoreFetch(RecallFetch):
    """The host asks the store: one synchronisation a layer, for a store with an arena that the device cannot read."""

    def __init__(
        self, kept: tuple[int, ...], pool: SlotPool, block_tables: BlockTables, offloader: Offloader
    ) -> None:
        """kept: the arena's number of each layer."""
        self._kept = kept
        self._pool = pool
        self._tables = block_tables.tables
        self._offloader = offloader

    def fetch(
        self, group: Group, layer: int, positions: Tensor, slots: Tensor, missed: Tensor, found: Tensor
    ) -> Tensor:
        pool_rows(self._tables[:, layer], group.lanes.seats, slots, found)
        wanted = positions.where(missed, -1).cpu().numpy()
        is_wanted = wanted >= 0
        if not is_wanted.any():
            return found
        items = [
            (sequence, kv_head, head[head >= 0])
            for sequence, heads in zip(group.sequences, wanted, strict=False)
            for kv_head, head in enumerate(heads)
            if (head >= 0).any()
        ]
        places = torch.tensor(np.stack(np.nonzero(is_wanted)), device=found.device).unbind(0)
        self._pool.rows[found[places].long()] = self._offloader.host.fetch(self._kept[layer], items)
        return found
