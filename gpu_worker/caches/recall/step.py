"""One decode step of the sequences that recall: select, make resident, attend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.caches.base import GroupStep
from gpu_worker.caches.probe import Probe, Sighting
from gpu_worker.caches.recall.fetch import RecallFetch
from gpu_worker.caches.recall.fixed_slots import FixedSlots, fixed_positions
from gpu_worker.caches.recall.hot_cache import HotCache
from gpu_worker.caches.recall.index_book import IndexBook
from gpu_worker.caches.recall.store_selection import StoreSelection
from gpu_worker.caches.whole_context import WholeContext
from gpu_worker.kernels.attention import attend_slots
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.recall import Candidates, FixedKeys, RecallPolicy
from gpu_worker.state.batch import Group
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool


@dataclass(frozen=True, slots=True)
class RecallParts:
    """What every recall step works with. in_store: selects in the place of `indexes`, where the store has these."""

    shape: CacheShape
    pool: SlotPool
    fixed: FixedSlots
    whole: WholeContext
    hot: HotCache | None
    fetch: RecallFetch | None
    indexes: IndexBook
    in_store: StoreSelection | None
    probe: Probe


class RecallStep(GroupStep):
    """The sequences of a group share a policy, and either all or none of them may miss."""

    def __init__(self, group: Group, layers: range, policy: RecallPolicy, parts: RecallParts) -> None:
        self.group = group
        self._layers = layers
        self._policy = policy
        self.reads_early_query = policy.reads_early_query
        self._parts = parts
        self._code_leaving()
        places = parts.hot if group.shape.can_miss else parts.whole
        assert places is not None, "a sequence that may miss was admitted without a hot cache"
        self.new_slots = places.place(group.rows, layers)
        parts.fixed.take_in(group.rows, layers, self.new_slots)
        self._measured = [row for row, one in enumerate(group.sequences) if one.request.measure]
        # Query, new keys and selection of each layer, for the probe.
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, layer: int, query: Tensor, early_query: Tensor) -> Tensor:
        parts, shape, rows = self._parts, self.group.shape, self.group.rows
        candidates = self._candidates(layer, query, early_query)
        # Ascending, -1 pads at the end: int64 [B, H_kv, K].
        positions = self._select(candidates)
        if self._measured:
            self._seen.append((query, self._newest(layer)[..., : query.shape[-1]], positions))
        selected = self._resident(layer, positions)
        fixed, pool, scale = parts.fixed.at(layer, shape.num_fixed), parts.pool.rows, parts.shape.scale
        attended = attend_slots(query, pool, fixed, rows.seats, selected, scale)
        if not self._policy.mixes_mean:
            return attended
        values = self._newest(layer)[..., query.shape[-1] :]
        return parts.indexes.mixed(self._policy, candidates, positions, rows, values, attended)

    def _select(self, candidates: Candidates) -> Tensor:
        parts, group = self._parts, self.group
        if parts.in_store is not None:
            return parts.in_store.select(candidates, group)
        return parts.indexes.select(self._policy, candidates, group.rows.counts, group.shape.num_selected)

    def _newest(self, layer: int) -> Tensor:
        """The new tokens' rows [B, H_kv, 2d]; padding has anyone's."""
        return self._parts.pool.rows[self.new_slots[:, layer - self._layers.start].clamp(min=0).long()]

    def finish(self) -> None:
        if not self._measured:
            return
        query, newest, selected = (torch.stack(tensors) for tensors in zip(*self._seen, strict=True))
        sightings = [
            Sighting(
                (sequence := self.group.sequences[row]),
                query[:, row],
                newest[:, row],
                torch.cat([_fixed_positions(sequence, selected[:, row]), selected[:, row]], dim=-1),
                selected[:, row],
            )
            for row in self._measured
        ]
        self._parts.probe.measure(self._layers, sightings)

    def _code_leaving(self) -> None:
        """Index the tokens that leave the window at this step, before their slots may become another's."""
        if self._policy.trains_when_leaving or self._parts.in_store is not None:
            return
        rows, parts = self.group.rows, self._parts
        slots = parts.fixed.leaving(rows, self._layers)
        keys = parts.pool.rows[slots.clamp(min=0).long()][..., : parts.shape.head_dim]
        parts.indexes.extend(self._policy, rows.seats, self._layers, rows.leaving, keys)

    def _candidates(self, layer: int, query: Tensor, early_query: Tensor) -> Candidates:
        rows, shape = self.group.rows, self.group.shape
        keys = num_tokens = fixed = None
        if self._policy.reads_keys:
            num_tokens = rows.positions + 1
            keys = self._keys(layer)
        if self._policy.mixes_mean:
            slots = self._parts.fixed.at(layer, shape.num_fixed)[rows.seats]
            fixed = FixedKeys(self._parts.pool.rows, slots)
        return Candidates(
            layer,
            query,
            rows.seats,
            rows.begin,
            rows.end,
            shape.num_positions,
            self._parts.shape.scale,
            keys,
            num_tokens,
            early_query if self.reads_early_query else None,
            fixed,
        )

    def _keys(self, layer: int) -> Tensor:
        """Keys of all tokens, the new one included: [B, H_kv, num_positions, d]."""
        rows, parts, width = self.group.rows, self._parts, self.group.shape.num_positions
        every = torch.arange(width, device=rows.positions.device)
        every = every.where(every <= rows.positions[:, None], -1)[:, None]
        slots = parts.whole.find(rows, layer, every.expand(-1, parts.shape.num_kv_heads, -1))
        return parts.pool.rows[slots.clamp(min=0).long()][..., : parts.shape.head_dim]

    def _resident(self, layer: int, positions: Tensor) -> Tensor:
        """Pool rows of what was selected, int32 [B, H_kv, K], -1 pads; missing rows are fetched into theirs."""
        parts = self._parts
        if parts.hot is None or parts.fetch is None or not self.group.shape.can_miss:
            return parts.whole.find(self.group.rows, layer, positions)
        slots, missed = parts.hot.resolve(self.group.rows, layer, positions)
        return parts.fetch.fetch(self.group, layer, positions, slots, missed)


def _fixed_positions(sequence: Sequence, like: Tensor) -> Tensor:
    """Sinks, window and new token for every layer and head: int64 [L, H_kv, F]."""
    return fixed_positions(sequence, sequence.num_tokens + 1, like.device).expand(*like.shape[:2], -1)
