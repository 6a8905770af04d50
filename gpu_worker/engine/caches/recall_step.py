"""One decode step of the sequences that recall: select, make resident, attend."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpu_worker.engine.caches.attended_order import AttendedOrder, num_taken
from gpu_worker.engine.caches.base import Group, GroupStep
from gpu_worker.engine.caches.hot_cache import HotCache
from gpu_worker.engine.caches.selection import Selection
from gpu_worker.engine.offload import Offloader
from gpu_worker.engine.probe import Probe, Sighting
from gpu_worker.engine.slot_pool import SlotPool
from gpu_worker.kernels.attention import attend_slots
from gpu_worker.kernels.resolve import Misses, claim, lookup


class RecallStep(GroupStep):
    """Selection differs from layer to layer; sinks, window, their slots and every count do not."""

    def __init__(
        self,
        group: Group,
        layers: range,
        selection: Selection,
        hot_cache: HotCache,
        pool: SlotPool,
        offloader: Offloader,
        probe: Probe,
        scale: float,
    ) -> None:
        self.group = group
        self._layers = layers
        self._selection = selection
        self._hot_cache = hot_cache
        self._pool = pool
        self._offloader = offloader
        self._probe = probe
        self._scale = scale
        self._order = AttendedOrder.of(group.sequences, selection.width, group.seats.device)
        # Sinks and window are never evicted: their slots hold for the whole step.
        self._fixed_slots = hot_cache.slots_in(group.seats, layers, self._order.fixed)
        # With a slot for every token that it may ever hold, a sequence cannot miss, and nobody needs to ask.
        can_miss = any(
            sequence.plan.selects and sequence.num_slots < sequence.capacity for sequence in group.sequences
        )
        self._seat_rows = hot_cache.seat_rows(group.sequences) if can_miss else None
        self._measured = [row for row, sequence in enumerate(group.sequences) if sequence.request.measure]
        # Query, new keys and selection of each layer, for the probe.
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def append(self, layer: int, rows: Tensor) -> None:
        self._pool.rows[self._fixed_slots[:, layer - self._layers.start, :, -1]] = rows

    def attend(self, layer: int, query: Tensor) -> Tensor:
        slots = self._fixed_slots[:, layer - self._layers.start]
        selected = slots[..., :0]
        if self._selection.width:
            selected = self._selection.select(layer, query)
            slots = self._order.join(self._resident(layer, selected), slots)
        else:
            slots = slots[..., 1:]  # without the pad
        self._count()
        if self._measured:
            newest = self._pool.rows[slots[..., -1]]
            self._seen.append((query, newest[..., : query.shape[-1]], selected))
        return attend_slots(query, self._pool.rows, slots, self._scale, is_padded=self._order.is_padded)

    def finish(self) -> None:
        if not self._measured:
            return
        query, newest, selected = (torch.stack(tensors) for tensors in zip(*self._seen, strict=True))
        positions = self._order.positions(selected)
        sightings = [
            Sighting(
                self.group.sequences[row], query[:, row], newest[:, row], positions[:, row], selected[:, row]
            )
            for row in self._measured
        ]
        self._probe.measure(self._layers, sightings)

    def _resident(self, layer: int, selected: Tensor) -> Tensor:
        """Pool rows [B, H_kv, K] of what was selected, -1 pads; the missing rows are fetched into theirs."""
        if self._seat_rows is None:
            self._count_hits(np.zeros(len(self.group.sequences), np.int64))
            return self._hot_cache.slots_of(self.group.seats, layer, selected)
        residency = self._hot_cache.at(layer)
        slots, missed = lookup(residency, self._seat_rows, selected)
        # The one synchronisation of a layer: the host must know what to ask the store for.
        wanted = selected.where(missed, -1).cpu().numpy()
        places = np.nonzero(wanted >= 0)
        per_head = (wanted >= 0).sum(axis=2)
        self._count_hits(per_head.sum(axis=1))
        if not len(places[0]):
            claim(residency, self._seat_rows, selected, slots, missed, None)
            return self._hot_cache.pool_rows(self.group.seats, layer, slots)
        row, head, column = torch.tensor(np.stack(places), device=selected.device).unbind(0)
        misses = Misses(row, head, column, most=int(per_head.max()))
        slots = claim(residency, self._seat_rows, selected, slots, missed, misses)
        resident = self._hot_cache.pool_rows(self.group.seats, layer, slots)
        items = [
            (sequence, kv_head, positions[positions >= 0])
            for sequence, heads, counts in zip(self.group.sequences, wanted, per_head, strict=True)
            for kv_head, positions in enumerate(heads)
            if counts[kv_head]
        ]
        self._pool.rows[resident[row, head, column]] = self._offloader.fetch(layer, items)
        return resident

    def _count_hits(self, num_missed: np.ndarray) -> None:
        for sequence, missed in zip(self.group.sequences, num_missed.tolist(), strict=True):
            if sequence.plan.selects:
                num_rows = (sequence.plan.num_selected or 0) * self._fixed_slots.shape[2]
                sequence.meter.selected_rows += num_rows
                sequence.meter.hit_rows += num_rows - missed

    def _count(self) -> None:
        """What one layer attends."""
        for sequence in self.group.sequences:
            plan, meter = sequence.plan, sequence.meter
            num_window = sequence.num_tokens - sequence.window_begin
            num_middle = num_taken(sequence) if plan.selects else sequence.window_begin - plan.num_sink
            meter.num_layer_steps += 1
            meter.attended_tokens += plan.num_sink + num_middle + (0 if plan.window_extra else num_window)
            meter.window_tokens += num_window if plan.window_extra else 0
