"""The content of the slots of sequences with compressed layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.retain import StepSlots
from gpu_worker.state.lane_inputs import LaneInputs
from gpu_worker.state.seat_table import SeatTable
from gpu_worker.state.slot_pool import SlotPool


class KeptSlots:
    """For each seat, layer and KV head: what its slots hold. A head's slots are filled from the first on.

    positions: int64 [seats + 1, L, H_kv, S], -1 where a slot is empty. lengths, limits: int32 [seats + 1, L, H_kv],
    slots that are filled, and most that ever are. notes: float32 like positions, a number of the policy's own for each
    slot; None until a policy has any.
    """

    def __init__(self, pool: SlotPool, shape: CacheShape) -> None:
        self._pool = pool
        self._shape = shape
        self.lengths = shape.seated(dtype=torch.int32).zero_()
        self.limits = shape.seated(dtype=torch.int32).zero_()
        self._positions = SeatTable(pool, shape, torch.int64, empty=-1)
        self._notes: SeatTable | None = None

    @property
    def positions(self) -> Tensor:
        return self._positions.table

    @property
    def notes(self) -> Tensor | None:
        return None if self._notes is None else self._notes.table

    @property
    def state(self) -> tuple[object, ...]:
        """A captured step is void once these are other objects."""
        return self.positions, self.notes

    @property
    def width(self) -> int:
        return self._positions.width

    def make_room(self, seat: int, width: int, has_notes: bool) -> None:
        """Have at least this many slots a head of a seat, and notes where the policy has any. Raises CapacityError."""
        if has_notes and self._notes is None:
            self._notes = SeatTable(self._pool, self._shape, torch.float32, empty=0.0)
            for other in self._positions.seats:
                # Every step writes notes where there are any.
                self._notes.take(other)
        for table in self._tables:
            table.make_room(max(width, self.width))
            table.take(seat)

    def pages_for(self, width: int) -> int:
        """Return the pages that a new seat takes, where it has so many slots a head, notes included."""
        heads = self._shape.num_layers * self._shape.num_kv_heads
        width = max(self.width, 1 << (width - 1).bit_length())
        return self._pool.pages_of(heads * width * 8) + self._pool.pages_of(heads * width * 4)

    def num_held_pages(self, seat: int) -> int:
        return sum(table.num_held_pages(seat) for table in self._tables)

    def free(self, seat: int) -> None:
        for table in self._tables:
            table.free(seat)

    @property
    def _tables(self) -> list[SeatTable]:
        return [self._positions] if self._notes is None else [self._positions, self._notes]

    def start_notes(self, seat: int, layers: range, notes: Tensor | None) -> None:
        """Start layers with the notes of their heads' first slots, float32 [layers * H_kv, S], if there are any; the
        others are 0."""
        if self.notes is None:
            return
        table = self.notes[seat, layers.start : layers.stop]
        count = 0 if notes is None else notes.shape[1]
        if notes is not None:
            table[..., :count] = notes.view(*table.shape[:2], count)
        table[..., count:].fill_(0.0)

    def before_step(self, rows: LaneInputs, width: int) -> StepSlots:
        """Return the slots from which an evicting policy chooses.

        width: at least the slots of any head of these lanes.
        """
        notes = None if self.notes is None else self.notes[..., :width][rows.seats]
        positions = self.positions[..., :width][rows.seats]
        return StepSlots(positions, notes, rows.begin, rows.end, rows.positions)

    def appended(self, rows: LaneInputs) -> Tensor:
        """The next slot of every head: int64 [B, L, H_kv]."""
        return self.lengths[rows.seats].long()

    def is_full(self, rows: LaneInputs) -> Tensor:
        """Return whether a head has no slot left: bool [B, L, H_kv]."""
        return self.lengths[rows.seats] >= self.limits[rows.seats]

    def take_in(self, rows: LaneInputs, slots: Tensor) -> Tensor:
        """Put the new tokens into slots int64 [B, L, H_kv]; returns how many slots are filled then, int64 alike, 0
        for padding."""
        wide = (rows.positions >= 0)[:, None, None]
        before = self.lengths[rows.seats]
        lengths = torch.maximum(before.long(), slots + 1)
        # Padding writes what is there.
        self.lengths[rows.seats] = torch.where(wide, lengths, before.long()).int()
        new = rows.positions[:, None, None].expand_as(slots)
        _put(self.positions, rows.seats, slots, new, wide)
        if self.notes is not None:
            _put(self.notes, rows.seats, slots, torch.zeros_like(slots, dtype=torch.float32), wide)
        return lengths.masked_fill(~wide, 0)

    def change_notes(
        self, rows: LaneInputs, layer: int, width: int, change: Callable[[Tensor], None]
    ) -> None:
        """Let `change` change one layer's notes of the first slots in place, float32 [B, H_kv, width]."""
        assert self.notes is not None, "a policy whose steps change notes keeps some from the prompt on"
        at_layer = self.notes[:, layer, :, :width]
        before = at_layer[rows.seats]
        after = before.clone()
        change(after)
        at_layer[rows.seats] = torch.where((rows.positions >= 0)[:, None, None], after, before)


def _put(table: Tensor, seats: Tensor, slots: Tensor, values: Tensor, is_real: Tensor) -> None:
    """Write one value a head where rows are real. table: [seats, L, H_kv, S]; slots, values: [B, L, H_kv]."""
    _, num_layers, num_heads = slots.shape
    layer = torch.arange(num_layers, device=slots.device)[:, None]
    head = torch.arange(num_heads, device=slots.device)
    place = (seats[:, None, None], layer, head, slots.where(is_real, 0))
    table[place] = torch.where(is_real, values.to(table.dtype), table[place])
