"""Rows of compressed layers in the slot pool: read to be compressed again, and written when something is kept."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpu_worker.caches.retain.kept_slots import KeptSlots
from gpu_worker.kernels.rows import gather_pairs, keep_rows
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.retain import LayerRows, Retained
from gpu_worker.state.block_tables import BlockTables, physical_slots
from gpu_worker.state.sequence import KeptLayer, Sequence
from gpu_worker.state.slot_pool import SlotPool


class KeptRows:
    """Several layers at once are treated as one layer of more heads, those of the first layer first. Nothing here waits
    for the device."""

    def __init__(self, shape: CacheShape, pool: SlotPool, block_tables: BlockTables, kept: KeptSlots) -> None:
        self._shape = shape
        self._pool = pool
        self._block_tables = block_tables
        self._kept = kept

    def read(self, sequence: Sequence, layers: range, num_decoded: int) -> LayerRows:
        """The rows of these layers by now; heads shorter than the longest are padded. The layers were compressed in
        as many rounds, and as many tokens ago."""
        held = [sequence.kept.layers[layer] for layer in layers]
        lengths = list(chain.from_iterable(one.lengths(num_decoded) for one in held))
        count = max(lengths)
        place = sequence.seat, slice(layers.start, layers.stop), slice(None), slice(count)
        # Copies: what is kept again goes to where these are read from.
        positions = self._kept.positions[place].flatten(0, 1).clone()
        head_dim, notes = self._shape.head_dim, self._kept.notes
        # Padding is not read: it holds anything.
        keys, values = self._pool.rows.new_empty(2, *positions.shape, head_dim)
        gather_pairs(self._bytes, self._offsets(sequence.seat, layers, positions), keys, values)
        return LayerRows(
            layers.start,
            self._shape.num_layers,
            sequence.num_tokens,
            keys,
            values,
            positions,
            keys.new_empty(len(lengths) * self._shape.group_size, 0, head_dim),
            self._shape.scale,
            sequence.request.sampling.seed or 0,
            None if notes is None else notes[place].flatten(0, 1).clone(),
            _histories(held, count),
            held[0].rounds,
            is_even=min(lengths) == count,
        )

    def write(self, seat: int, layers: range, retained: Retained, room: int) -> None:
        """Start layers with what is kept of their heads, the first layer's first, in the first slots, which were
        divided among the heads before. room: slots that each head may take in addition."""
        kept, dtype = self._kept, self._pool.rows.dtype
        tables = self._block_tables.tables
        keep_rows(
            retained.positions,
            retained.keys.to(dtype),
            retained.values.to(dtype),
            self._pool.rows,
            tables,
            kept.positions,
            kept.lengths,
            kept.limits,
            seat,
            layers.start,
            room,
        )
        kept.start_notes(seat, layers, retained.notes)

    @property
    def _bytes(self) -> Tensor:
        """The pool as an arena: uint8 [bytes]."""
        return self._pool.rows.view(torch.uint8).flatten()

    def _offsets(self, seat: int, layers: range, positions: Tensor) -> Tensor:
        """Where the rows of the first slots begin in the pool, int64 [layers * H_kv, S]; -1 where a position is."""
        tables = self._block_tables.tables[seat, layers.start : layers.stop].flatten(0, 1)
        slots = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        return (physical_slots(tables, slots) * self._pool.row_format.row_bytes).masked_fill_(
            positions < 0, -1
        )


def _histories(held: list[KeptLayer], count: int) -> Tensor | None:
    """Return the history of all heads, [layers * H_kv, count, m]: the kept rows fill the first slots, the slots of
    later tokens are zero. None where a layer has no history."""
    known = [one.history for one in held if one.history is not None]
    if len(known) < len(held):
        return None
    return torch.cat([pad(history, (0, 0, 0, count - history.shape[1])) for history in known])
