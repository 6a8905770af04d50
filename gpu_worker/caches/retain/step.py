"""One decode step of sequences whose layers are compressed: a slot for the new token, attention over what is kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.caches.base import GroupStep
from gpu_worker.caches.probe import Probe, Sighting
from gpu_worker.caches.retain.kept_slots import KeptSlots
from gpu_worker.kernels.attention import attend_blocks
from gpu_worker.kernels.rows import pool_rows
from gpu_worker.kernels.slot_weights import slot_weights
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.retain import RetainPolicy, StepSlots
from gpu_worker.state.batch import Group
from gpu_worker.state.slot_pool import BlockTables, SlotPool


@dataclass(frozen=True, slots=True)
class RetainParts:
    """What every retain step works with."""

    shape: CacheShape
    pool: SlotPool
    block_tables: BlockTables
    kept: KeptSlots
    probe: Probe


class RetainStep(GroupStep):
    """The sequences of a group share a policy."""

    def __init__(self, group: Group, layers: range, policy: RetainPolicy, parts: RetainParts) -> None:
        self.group = group
        self._layers = layers
        self._policy = policy
        self._parts = parts
        self._tables = parts.block_tables.tables
        slots = self._slots()
        self.new_slots = self._pool_rows(slots[..., None])[..., 0]
        self._lengths = parts.kept.take_in(group.rows, layers, slots)
        if policy.num_shifted:
            self._shift_sinks()
        measured = [row for row, one in enumerate(group.sequences) if one.request.measure]
        # Means of rows lie at no position.
        self._measured = [] if policy.has_degrees else measured
        # Query and new keys of each layer, for the probe.
        self._seen: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, query: Tensor, early_query: Tensor) -> Tensor:
        parts, rows, longest = self._parts, self.group.rows, self.group.shape.num_positions
        place, tables = layer - self._layers.start, self._tables[:, layer]
        lengths, pool, scale = self._lengths[:, place], parts.pool.rows, parts.shape.scale
        if self._measured:
            newest = pool[self.new_slots[:, place].long()]
            self._seen.append((query, newest[..., : query.shape[-1]]))
        degrees = parts.kept.log_degrees if self._policy.has_degrees else None
        bias = None if degrees is None else degrees[:, layer]
        if self._policy.observes:
            weights = slot_weights(query, pool, tables, rows.seats, lengths, scale, longest)
            parts.kept.observe(self._policy, rows, layer, weights)
        return attend_blocks(query, pool, tables, rows.seats, lengths, scale, longest, bias)

    def finish(self) -> None:
        if not self._measured:
            return
        query, newest = (torch.stack(tensors) for tensors in zip(*self._seen, strict=True))
        span = slice(self._layers.start, self._layers.stop)
        sightings = []
        for row in self._measured:
            sequence = self.group.sequences[row]
            positions = self._parts.kept.positions[sequence.seat, span]
            is_middle = (positions >= sequence.plan.num_sink) & (positions < sequence.window_begin)
            selected = positions.where(is_middle, -1)
            sightings.append(Sighting(sequence, query[:, row], newest[:, row], positions, selected))
        self._parts.probe.measure(self._layers, sightings)

    def _slots(self) -> Tensor:
        """Where the new tokens go: int64 [B, layers, H_kv]."""
        rows, kept, policy = self.group.rows, self._parts.kept, self._policy
        appended = kept.appended(rows, self._layers)
        if not policy.evicts:
            return appended
        before = kept.before_step(rows, self._layers, self.group.shape.num_positions)
        is_full = kept.is_full(rows, self._layers) & (rows.positions >= 0)[:, None, None]
        evicted = policy.evict(before)
        if policy.gives:
            self._give(before, evicted, is_full)
        return torch.where(is_full, evicted, appended)

    def _shift_sinks(self) -> None:
        """Turn the sinks' keys on to where the window begins: by as many positions as are gone."""
        rows, pool, kept = self.group.rows, self._parts.pool.rows, self._parts.kept.sink_keys
        key_shift = self._parts.shape.key_shift
        assert kept is not None, "room for sinks is made when a layer is kept"
        assert key_shift is not None, "the engine's shape has the model's rotation"
        keys = kept[:, self._layers.start : self._layers.stop][rows.seats]
        gone = rows.positions[:, None, None] + 1 - self._lengths
        turned = key_shift.apply(keys, gone[..., None])
        # Where a row has fewer sinks its first one is written again, and in place of padding the first row's are, which
        # is never padding: to write elsewhere what lies there would race with who writes there.
        every = torch.arange(keys.shape[3], device=keys.device)
        slots = every.where(every < rows.begin[:, None], 0)[:, None, None].expand(keys.shape[:-1])
        places = self._pool_rows(slots)
        turned = turned.gather(3, slots[..., None].expand_as(turned))
        is_real = (rows.positions >= 0)[:, None, None, None]
        places, turned = places.where(is_real, places[:1]), turned.where(is_real[..., None], turned[:1])
        pool[:, : keys.shape[-1]].index_put_((places.flatten().long(),), turned.flatten(0, 3))

    def _give(self, before: StepSlots, evicted: Tensor, is_full: Tensor) -> None:
        """Add evicted values to those that the policy names, before they are overwritten."""
        gift = self._policy.give(before, evicted)
        pool, head_dim = self._parts.pool.rows, self._parts.shape.head_dim
        # A head that evicts nothing may name a slot that it has not.
        source = self._pool_rows(evicted.where(is_full, -1)[..., None])[..., 0].clamp(min=0).long()
        targets = self._pool_rows(gift.slots)
        share = gift.share.where(is_full, 0.0)[..., None] * (targets >= 0)
        given = pool[source][..., None, head_dim:].float() * share[..., None]
        # Where nothing is given nothing is added, whatever lies in the slot.
        given = given.where(share[..., None] > 0, 0.0).to(pool.dtype)
        pool[:, head_dim:].index_add_(0, targets.clamp(min=0).long().flatten(), given.flatten(0, -2))

    def _pool_rows(self, slots: Tensor) -> Tensor:
        """Pool rows of slots int64 [B, layers, H_kv, R]: int32 alike, -1 for -1 and for padding."""
        tables = self._tables[:, self._layers.start : self._layers.stop].flatten(1, 2)
        is_real = (self.group.rows.positions >= 0)[:, None, None]
        asked = slots.flatten(1, 2).where(is_real, -1)
        found = torch.empty(asked.shape, dtype=torch.int32, device=asked.device)
        pool_rows(tables, self.group.rows.seats, asked, found)
        return found.view(slots.shape)
