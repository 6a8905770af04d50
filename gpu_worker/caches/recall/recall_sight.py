"""What a recall sequence selected in the last step, and which tokens have a slot."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.caches.recall.hot_cache import HotCache
from gpu_worker.caches.recall.seen_rows import SeenRows
from gpu_worker.caches.sight import MAX_ELEMENTS, LanePlace, Sight, spread
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import BlockTables, SlotPool, num_blocks


class RecallSight:
    """Asked after a step and before anything changes slots; nothing here waits for the device."""

    def __init__(self, seen: SeenRows, pool: SlotPool, block_tables: BlockTables) -> None:
        self._seen = seen
        self._pool = pool
        self._tables = block_tables.tables

    def of(self, sequence: Sequence, place: LanePlace, hot: HotCache | None, most: int) -> Sight | None:
        """In at most so many layers; None where there was no room to keep what was selected. hot: of a
        sequence that may miss."""
        seen = self._seen.of(place.shape, place.first_lane)
        if not seen:
            return None
        widest = max(place.shape.num_selected, 0 if hot is None else sequence.num_slots)
        most = min(most, max(1, MAX_ELEMENTS // (self._tables.shape[2] * widest)))
        kept = spread(list(seen), most)
        slots = self._slots(sequence, kept, torch.stack([seen[layer][place.lane] for layer in kept]))
        if hot is None:
            return Sight(tuple(kept), slots, None, has_fixed=True)
        # Slices by numbers: a list of layers would be copied to the device, and waited for.
        seat, count = sequence.seat, sequence.num_slots
        token_of = torch.stack([hot.token_of[seat, layer, :, :count] for layer in kept])
        filled = torch.stack([hot.filled[seat, layer] for layer in kept])[..., None]
        is_held = torch.arange(count, device=token_of.device) < filled
        attended = token_of.gather(-1, slots.clamp(0, count - 1)).masked_fill(slots < 0, -1)
        return Sight(tuple(kept), attended, token_of.where(is_held, -1), has_fixed=True)

    def _slots(self, sequence: Sequence, layers: list[int], rows: Tensor) -> Tensor:
        """The sequence's slots that lie in pool rows int32 [L, H_kv, K], -1 stays -1: int64."""
        held = num_blocks(sequence.num_slots)
        tables = torch.stack([self._tables[sequence.seat, layer, :, :held] for layer in layers])
        # A block belongs to one layer and head.
        index_of = torch.empty(self._pool.num_blocks, dtype=torch.int64, device=rows.device)
        index_of[tables] = torch.arange(held, device=rows.device).expand_as(tables)
        blocks = index_of[(rows // BLOCK_SIZE).clamp(0, self._pool.num_blocks - 1).long()]
        return (blocks * BLOCK_SIZE + rows % BLOCK_SIZE).masked_fill(rows < 0, -1)
