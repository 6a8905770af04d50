"""Rows of compressed layers in the slot pool: read to be compressed again, and written when something is kept."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpu_worker.engine.caches.kept_slots import KeptSlots
from gpu_worker.engine.kept_layer import KeptLayer
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.slot_pool import BlockTables, SlotPool, physical_slots
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.retain import LayerRows, Retained


class KeptRows:
    """Several layers at once are one layer of more heads, the heads of the first layer first. Nothing here waits for
    the device."""

    def __init__(
        self, shape: CacheShape, pool: SlotPool, block_tables: BlockTables, kept: KeptSlots, first_layer: int
    ) -> None:
        """first_layer: of those that are compressed."""
        self._shape = shape
        self._pool = pool
        self._block_tables = block_tables
        self._kept = kept
        self._first_layer = first_layer

    def read(self, sequence: Sequence, layers: range, num_decoded: int) -> LayerRows:
        """What is kept of these layers by now; heads that hold less than the longest are padded. They were
        compressed in as many rounds, and so many tokens ago."""
        held = [sequence.kept_layers[layer] for layer in layers]
        lengths = list(chain.from_iterable(one.lengths(num_decoded) for one in held))
        count = max(lengths)
        place = sequence.seat, slice(layers.start, layers.stop), slice(None), slice(count)
        # Copies: what is kept again goes to where these are read from.
        positions = self._kept.positions[place].flatten(0, 1).clone()
        slots = torch.arange(count, device=positions.device).expand_as(positions)
        places = physical_slots(self._tables(sequence.seat, layers), slots.masked_fill(positions < 0, -1))
        rows = self._pool.rows[places.clamp_(min=0)]
        head_dim, log_degrees, scores = self._shape.head_dim, self._kept.log_degrees, self._kept.scores
        return LayerRows(
            layers.start - self._first_layer,
            self._shape.num_layers - self._first_layer,
            sequence.num_tokens,
            rows[..., :head_dim],
            rows[..., head_dim:],
            positions,
            rows.new_empty(len(lengths) * self._shape.group_size, 0, head_dim),
            self._shape.scale,
            sequence.request.sampling.seed or 0,
            None if log_degrees is None else log_degrees[place].flatten(0, 1).exp(),
            None if scores is None else scores[place].flatten(0, 1).clone(),
            _histories(held, count),
            held[0].rounds,
            is_even=min(lengths) == count,
        )

    def write(self, seat: int, layers: range, retained: Retained, counts: list[int]) -> None:
        """Put what is kept into the layers' first slots, that were dealt before. counts: of every head."""
        width, head_dim = retained.positions.shape[1], self._shape.head_dim
        slots = torch.arange(width, device=retained.positions.device).expand_as(retained.positions)
        places = physical_slots(self._tables(seat, layers), slots)
        keys, values = retained.keys, retained.values
        if min(counts) < width:
            # Padding has no place: it writes once more what a head that kept the most has in its first slot.
            donor, is_there = counts.index(max(counts)), retained.positions >= 0
            places = places.where(is_there, places[donor, 0])
            keys = keys.where(is_there[..., None], keys[donor, 0])
            values = values.where(is_there[..., None], values[donor, 0])
        pool = self._pool.rows
        pool[:, :head_dim].index_put_((places,), keys.to(pool.dtype))
        pool[:, head_dim:].index_put_((places,), values.to(pool.dtype))

    def _tables(self, seat: int, layers: range) -> Tensor:
        """Of the heads of these layers: int64 [layers * H_kv, max_blocks]."""
        return self._block_tables.tables[seat, layers.start : layers.stop].flatten(0, 1)


def _histories(held: list[KeptLayer], count: int) -> Tensor | None:
    """Of all heads, [layers * H_kv, count, m]: what was kept lies in the first slots, and nothing is known of what came
    since."""
    known = [one.history for one in held if one.history is not None]
    if len(known) < len(held):
        return None
    return torch.cat([pad(history, (0, 0, 0, count - history.shape[1])) for history in known])
