"""Snapshots of what a recall step selected, in rows that stay until the next one, and of which tokens have a slot."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.caches.recall.hot_cache import HotCache
from gpu_worker.caches.snapshots import MAX_ELEMENTS, LanePlace, Snapshot, spread
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.policies.base import CacheShape
from gpu_worker.state.batch import GroupShape
from gpu_worker.state.block_tables import BlockTables
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool, num_blocks

ROOM_BYTES = 16 << 20
# Of a step with more lanes nothing is kept.
MAX_LANES = 32
# Of a lane's part in numbers: kernels are compiled for addresses that are multiples of 16 bytes.
ALIGNMENT = 64


class SeenRows:
    """The pool rows that a step's layers look up anyway, written to a place that stays instead of one that the next
    layer may take: a captured step has no launch more, and no address that changes. Where memory does not suffice for
    all layers, some have theirs kept, evenly."""

    def __init__(self, shape: CacheShape) -> None:
        self._num_layers, self._num_heads = shape.num_layers, shape.num_kv_heads
        self._num_lanes = min(shape.max_num_seqs, MAX_LANES)
        most = shape.num_layers * shape.num_kv_heads * shape.max_model_len
        room = min(most + ALIGNMENT, ROOM_BYTES // 4 // self._num_lanes)
        self._per_lane = room // ALIGNMENT * ALIGNMENT
        with torch.inference_mode(False):
            self._rows = torch.empty(self._num_lanes * self._per_lane, dtype=torch.int32, device=shape.device)

    @property
    def num_bytes(self) -> int:
        return self._rows.nbytes

    def of(self, shape: GroupShape, first_lane: int) -> dict[int, Tensor]:
        """For some of the layers the place of a group's rows: int32 [B, H_kv, K], -1 pads."""
        per_layer = self._num_heads * shape.num_selected
        if not per_layer or first_lane + shape.num_lanes > self._num_lanes:
            # Padding may make a step wider than its seats.
            return {}
        kept = spread(range(self._num_layers), self._per_lane // per_layer)
        begin, count = first_lane * self._per_lane, len(kept) * shape.num_lanes * per_layer
        places = self._rows[begin : begin + count].view(
            len(kept), shape.num_lanes, self._num_heads, shape.num_selected
        )
        return dict(zip(kept, places.unbind(0), strict=True))


class RecallSnapshots:
    """Asked after a step and before anything changes slots; nothing here waits for the device."""

    def __init__(self, seen: SeenRows, pool: SlotPool, block_tables: BlockTables) -> None:
        self._seen = seen
        self._pool = pool
        self._tables = block_tables.tables

    def of(self, sequence: Sequence, place: LanePlace, hot: HotCache | None, most: int) -> Snapshot | None:
        """Return a snapshot of at most so many layers; None where there was no memory to keep what was selected. hot:
        of a sequence that may miss."""
        seen = self._seen.of(place.shape, place.first_lane)
        if not seen:
            return None
        widest = max(place.shape.num_selected, 0 if hot is None else sequence.num_slots)
        most = min(most, max(1, MAX_ELEMENTS // (self._tables.shape[2] * widest)))
        kept = spread(list(seen), most)
        slots = self._slots(sequence, kept, torch.stack([seen[layer][place.lane] for layer in kept]))
        if hot is None:
            return Snapshot(tuple(kept), slots, None, has_fixed=True)
        # Slices by numbers: a list of layers would be copied to the device, and waited for.
        seat, count = sequence.seat, sequence.num_slots
        token_of = torch.stack([hot.token_of[seat, layer, :, :count] for layer in kept])
        filled = torch.stack([hot.filled[seat, layer] for layer in kept])[..., None]
        is_held = torch.arange(count, device=token_of.device) < filled
        attended = token_of.gather(-1, slots.clamp(0, count - 1)).masked_fill(slots < 0, -1)
        return Snapshot(tuple(kept), attended, token_of.where(is_held, -1), has_fixed=True)

    def _slots(self, sequence: Sequence, layers: list[int], rows: Tensor) -> Tensor:
        """The sequence's slots that lie in pool rows int32 [L, H_kv, K], -1 stays -1: int64."""
        held = num_blocks(sequence.num_slots)
        tables = torch.stack([self._tables[sequence.seat, layer, :, :held] for layer in layers])
        # A block belongs to one layer and head.
        index_of = torch.empty(self._pool.num_blocks, dtype=torch.int64, device=rows.device)
        index_of[tables] = torch.arange(held, device=rows.device).expand_as(tables)
        blocks = index_of[(rows // BLOCK_SIZE).clamp(0, self._pool.num_blocks - 1).long()]
        return (blocks * BLOCK_SIZE + rows % BLOCK_SIZE).masked_fill(rows < 0, -1)
