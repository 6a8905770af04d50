"""The selection of a recall step: selected by policy or store, its rows brought to the device."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_worker.caches.probe import Probe
from gpu_worker.caches.recall.fetch import RecallFetch
from gpu_worker.caches.recall.fixed_slots import FixedSlots
from gpu_worker.caches.recall.hot_cache import HotCache
from gpu_worker.caches.recall.snapshots import SeenRows
from gpu_worker.caches.recall.store_selection import StoreSelection
from gpu_worker.caches.whole_context import WholeContext
from gpu_worker.device import SideStream
from gpu_worker.kernels.attention import Rest, attend_slots
from gpu_worker.policies.base import CacheShape, StepQueries
from gpu_worker.policies.recall import Candidates, RecallPolicy
from gpu_worker.state.batch import Group
from gpu_worker.state.slot_pool import SlotPool
from gpu_worker.store.kv_meter import KVMeter


@dataclass(frozen=True, slots=True)
class RecallParts:
    """The parts that every recall step uses.

    in_store: selects if the store has the indexes; else None.
    meter: of the host, where that computes; None: a device does, in its own time.
    beside: a side stream for what attention needs last.
    """

    shape: CacheShape
    pool: SlotPool
    fixed: FixedSlots
    whole: WholeContext
    hot: HotCache
    fetch: RecallFetch | None
    in_store: StoreSelection | None
    probe: Probe
    seen: SeenRows
    meter: KVMeter | None
    beside: SideStream


class Selection:
    """Selection of one group, and attention over sinks, window and what is selected; rows that the hot cache misses
    are fetched.

    latest: positions selected in the last layer, int64 [B, H_kv, K], ascending, then -1.
    """

    latest: Tensor

    def __init__(self, group: Group, policy: RecallPolicy, index: Any, parts: RecallParts) -> None:
        self._group = group
        self._seen = parts.seen.of(group.shape, group.first_lane)
        self._policy = policy
        self._index = index
        self._parts = parts

    def attend(self, layer: int, queries: StepQueries) -> Tensor:
        """Attention of the new tokens, exact over sinks, window and selection: [B, H_q, d]."""
        rows, shape, parts, scale = self._group.lanes, self._group.shape, self._parts, self._parts.shape.scale
        candidates = Candidates(
            layer,
            queries,
            rows.seats,
            rows.begin,
            rows.end,
            shape.num_positions,
            scale,
            partial(self._exact_keys, layer),
            partial(self._fixed_keys, layer),
        )
        self.latest = self._selected(candidates)
        rest = self._rest(candidates)
        try:
            selected = self._resident(layer, self.latest)
            fixed = parts.fixed.at(layer, shape.num_fixed)
            return attend_slots(queries.own, parts.pool.rows, fixed, rows.seats, selected, scale, rest)
        except BaseException:
            if rest is not None:
                # From here on the memory of what the side stream reads and writes may be reused.
                rest.ready()
            raise

    def _rest(self, candidates: Candidates) -> Rest | None:
        """Return the approximate row for the candidates that are not in `latest`, computed while rows are fetched and
        attended."""
        parts = self._parts
        if parts.in_store is not None or not self._policy.stands_in:
            return None
        rest = Rest.room(candidates.query, parts.beside.join)
        with parts.beside.queue():
            self._policy.stand_in(self._index, candidates, self.latest, rest)
        return rest

    def _selected(self, candidates: Candidates) -> Tensor:
        """The store selects, or the policy over its index on the device: int64 [B, H_kv, K], ascending, then -1."""
        group, in_store = self._group, self._parts.in_store
        if in_store is not None:
            return in_store.select(candidates, group)
        meter = self._parts.meter
        with nullcontext() if meter is None else meter.search.timed():
            return self._policy.select(self._index, candidates, group.lanes.counts, group.shape.num_selected)

    def _exact_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        rows, parts, width = self._group.lanes, self._parts, self._group.shape.num_positions
        every = torch.arange(width, device=rows.positions.device)
        every = every.where(every <= rows.positions[:, None], -1)[:, None]
        slots = parts.whole.find(rows, layer, every.expand(-1, parts.shape.num_kv_heads, -1))
        keys = parts.pool.rows[slots.clamp(min=0).long()][..., : parts.shape.head_dim]
        return keys, rows.positions + 1

    def _fixed_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        parts = self._parts
        slots = parts.fixed.at(layer, self._group.shape.num_fixed)[self._group.lanes.seats]
        return parts.pool.rows[slots.clamp(min=0).long()][..., : parts.shape.head_dim], slots >= 0

    def _resident(self, layer: int, positions: Tensor) -> Tensor:
        """Pool rows of what was selected, int32 [B, H_kv, K], -1 pads; missing rows are fetched into theirs."""
        parts, found = self._parts, self._seen.get(layer)
        if found is None or found.shape != positions.shape:
            found = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
        if parts.fetch is None or not self._group.shape.can_miss:
            return parts.whole.find(self._group.lanes, layer, positions, found)
        slots, missed = parts.hot.resolve(self._group.lanes, layer, positions)
        is_read_here = parts.meter is not None and parts.fetch.arena is not None and missed.any()
        with parts.meter.gather.timed() if parts.meter and is_read_here else nullcontext():
            return parts.fetch.fetch(self._group, layer, positions, slots, missed, found)
