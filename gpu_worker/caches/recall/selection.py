"""The selection of a recall step: selected by policy or store, its rows brought to the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_worker.caches.probe import Probe
from gpu_worker.caches.recall.fetch import RecallFetch
from gpu_worker.caches.recall.fixed_slots import FixedSlots
from gpu_worker.caches.recall.hot_cache import HotCache
from gpu_worker.caches.recall.store_selection import StoreSelection
from gpu_worker.caches.whole_context import WholeContext
from gpu_worker.kernels.attention import attend_slots
from gpu_worker.policies.base import CacheShape, StepQueries
from gpu_worker.policies.recall import Candidates, FixedKeys, RecallPolicy, Selected, SelectingStep
from gpu_worker.state.batch import Group
from gpu_worker.state.slot_pool import SlotPool


@dataclass(frozen=True, slots=True)
class RecallParts:
    """The parts that every recall step uses. in_store: selects if the store has the indexes; else None."""

    shape: CacheShape
    pool: SlotPool
    fixed: FixedSlots
    whole: WholeContext
    hot: HotCache | None
    fetch: RecallFetch | None
    in_store: StoreSelection | None
    probe: Probe


class Selection(SelectingStep):
    """Selection of one group in some layers; rows that the hot cache misses are fetched."""

    def __init__(
        self,
        group: Group,
        layers: range,
        new_slots: Tensor,
        policy: RecallPolicy,
        index: Any,
        parts: RecallParts,
    ) -> None:
        """new_slots: int32 [B, layers, H_kv], the pool rows of the new tokens."""
        self.positions = group.lanes.positions
        self._group = group
        self._layers = layers
        self._new_slots = new_slots
        self._policy = policy
        self._index = index
        self._parts = parts

    def select(self, layer: int, queries: StepQueries) -> Selected:
        rows, shape, scale = self._group.lanes, self._group.shape, self._parts.shape.scale
        candidates = Candidates(
            layer,
            queries,
            rows.seats,
            rows.begin,
            rows.end,
            shape.num_positions,
            scale,
            partial(self._exact_keys, layer),
        )
        positions = self._selected(candidates)
        self.latest = Selected(candidates, positions, self._resident(layer, positions))
        return self.latest

    def _selected(self, candidates: Candidates) -> Tensor:
        """The store selects, or the policy over its index on the device: int64 [B, H_kv, K], ascending, then -1."""
        group, in_store = self._group, self._parts.in_store
        if in_store is not None:
            return in_store.select(candidates, group)
        return self._policy.select(self._index, candidates, group.lanes.counts, group.shape.num_selected)

    def attend_selected(self, selected: Selected) -> Tensor:
        candidates, parts = selected.candidates, self._parts
        fixed = parts.fixed.at(candidates.layer, self._group.shape.num_fixed)
        return attend_slots(
            candidates.query, parts.pool.rows, fixed, candidates.seats, selected.pool_rows, candidates.scale
        )

    def fixed_keys(self, layer: int) -> FixedKeys:
        slots = self._parts.fixed.at(layer, self._group.shape.num_fixed)[self._group.lanes.seats]
        return FixedKeys(self._parts.pool.rows, slots)

    def new_values(self, layer: int) -> Tensor:
        return self.newest(layer)[..., self._parts.shape.head_dim :]

    def newest(self, layer: int) -> Tensor:
        """The new tokens' rows [B, H_kv, 2d]; padding lanes have arbitrary ones."""
        slots = self._new_slots[:, layer - self._layers.start]
        return self._parts.pool.rows[slots.clamp(min=0).long()]

    def _exact_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        rows, parts, width = self._group.lanes, self._parts, self._group.shape.num_positions
        every = torch.arange(width, device=rows.positions.device)
        every = every.where(every <= rows.positions[:, None], -1)[:, None]
        slots = parts.whole.find(rows, layer, every.expand(-1, parts.shape.num_kv_heads, -1))
        keys = parts.pool.rows[slots.clamp(min=0).long()][..., : parts.shape.head_dim]
        return keys, rows.positions + 1

    def _resident(self, layer: int, positions: Tensor) -> Tensor:
        """Pool rows of what was selected, int32 [B, H_kv, K], -1 pads; missing rows are fetched into theirs."""
        parts = self._parts
        if parts.hot is None or parts.fetch is None or not self._group.shape.can_miss:
            return parts.whole.find(self._group.lanes, layer, positions)
        slots, missed = parts.hot.resolve(self._group.lanes, layer, positions)
        return parts.fetch.fetch(self._group, layer, positions, slots, missed)
