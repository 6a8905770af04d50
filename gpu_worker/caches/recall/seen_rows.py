"""Where the last step found what it selected, kept until the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.caches.sight import spread
from gpu_worker.policies.base import CacheShape
from gpu_worker.state.batch import GroupShape

ROOM_BYTES = 16 << 20
# Of a lane's part in numbers: kernels are compiled for addresses that are multiples of 16 bytes.
ALIGNMENT = 64


class SeenRows:
    """The pool rows that a step's layers look up anyway, written to a place that stays instead of one that the next
    layer may take: a captured step has no launch more, and no address that changes. Where the room does not suffice
    for all layers, some have theirs kept, evenly.
    """

    def __init__(self, shape: CacheShape) -> None:
        self._num_layers, self._num_heads = shape.num_layers, shape.num_kv_heads
        self._num_lanes = shape.max_num_seqs
        most = shape.num_layers * shape.num_kv_heads * shape.max_model_len
        room = min(most + ALIGNMENT, ROOM_BYTES // 4 // shape.max_num_seqs)
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
