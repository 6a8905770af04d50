"""Pool rows of what every decode step attends in any case: sinks, window and the new token."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.policies.base import CacheShape
from gpu_worker.state.lane_inputs import LaneInputs
from gpu_worker.state.seat_table import SeatTable
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool


def fixed_positions(sequence: Sequence, end: int, device: torch.device) -> Tensor:
    """Sinks, and the window up to position `end`: int64 [T], ascending."""
    sinks = torch.arange(sequence.plan.num_sink, device=device)
    return torch.cat([sinks, torch.arange(sequence.window_begin, end, device=device)])


class FixedSlots(SeatTable):
    """For each seat, layer and KV head: a column for every sink, then a ring in which the new token takes the place of
    the one that leaves the window. Attention does not depend on the order.

    table: int32 [seats + 1, L, H_kv, width + 1], -1 where nothing is. Padding writes in the last column.
    """

    def __init__(self, pool: SlotPool, shape: CacheShape) -> None:
        super().__init__(pool, shape, torch.int32, empty=-1, spare=1)

    def fill(self, sequence: Sequence, layers: range, positions: Tensor, pool_rows: Tensor) -> None:
        """Start these layers with sinks and window tokens, int64 [T], that lie in pool rows [layers, H_kv, T]."""
        at_layers = self.table[sequence.seat, layers.start : layers.stop]
        at_layers.fill_(-1)
        num_sink = sequence.plan.num_sink
        in_ring = num_sink + positions % sequence.ring_size
        columns = torch.where(positions < num_sink, positions, in_ring)
        at_layers[:, :, columns] = pool_rows.int()

    def clear_window(self, sequence: Sequence) -> None:
        """Empty the sequence's window in every layer."""
        num_sink = sequence.plan.num_sink
        window = slice(num_sink, num_sink + sequence.ring_size)
        self.table[sequence.seat, :, :, window].fill_(-1)

    def window_rows(self, sequence: Sequence, layer: int, positions: Tensor) -> Tensor:
        """Pool rows of window positions int64 [T], in every head: int64 [H_kv, T]."""
        columns = sequence.plan.num_sink + positions % sequence.ring_size
        return self.table[sequence.seat, layer][:, columns].long()

    def leaving(self, rows: LaneInputs) -> Tensor:
        """Pool rows that the new tokens will push out: int32 [B, L, H_kv], -1 where the ring has a free place."""
        return self.table[rows.seats[:, None], :, :, rows.ring[:, None]][:, 0]

    def take_in(self, rows: LaneInputs, new_slots: Tensor) -> None:
        """Put the new tokens, in pool rows int32 [B, L, H_kv], into the ring."""
        self.table.permute(0, 3, 1, 2)[rows.seats, rows.ring] = new_slots

    def at(self, layer: int, width: int) -> Tensor:
        """The part of one layer: int32 [seats, H_kv, width], a view."""
        return self.table[:, layer, :, :width]
