"""The hot cache's clock on the GPU, with no word from the host.

Three launches, one after the other over the same state:

look_up, a program for each (row, KV head): slots of the required positions; those that are hit are marked.
count, a program for each (row, KV head, tile of the ring): how many slots of the tile are free, clear or set. This is
    the only one that reads all slots (5 bytes each), so it is the one that is spread over the whole GPU: 48 heads of
    80K slots are 1920 programs and 19 MB. Heads without a miss stop at once.
take, a program for each (row, KV head): walks the tiles from the hand on and stops at the last victim, commonly in
    the first or second tile; then clears the bits behind the hand and writes the new entries.

A tile is a run of the ring, not of the slots: it begins TILE steps of the hand after the one before it.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.resolve.programs import count, look_up, take
from gpu_worker.kernels.resolve.reference import Residency, SeatRows

TILE = 2048
COLUMNS = 1024


def resolve_on_device(residency: Residency, rows: SeatRows, required: Tensor) -> tuple[Tensor, Tensor]:
    """`resolve` without the host: the same slots, misses and state; three launches, fit for a CUDA graph.

    No seat may stand in two rows. required: int64 [B, H_kv, R], no position twice in a head, -1 pads. Returns (slots
    int64 [B, H_kv, R], -1 pads; missed bool [B, H_kv, R]). The caller guarantees room, as there; a miss without room
    is left without a slot (-1).
    """
    batch, num_heads, num_columns = required.shape
    slots = torch.empty((batch, num_heads, num_columns), dtype=torch.int64, device=required.device)
    missed = torch.empty((batch, num_heads, num_columns), dtype=torch.bool, device=required.device)
    num_places = batch * num_heads
    if num_places == 0 or num_columns == 0:
        return slots, missed
    num_tiles = triton.cdiv(rows.width, TILE)
    num_missed = torch.empty(num_places, dtype=torch.int32, device=required.device)
    counts = torch.empty((num_places, 3, num_tiles), dtype=torch.int32, device=required.device)
    victims = torch.empty((num_places, num_columns), dtype=torch.int32, device=required.device)
    slot_of, token_of, hand = residency.slot_of, residency.token_of, residency.hand
    referenced = residency.referenced.view(torch.uint8)
    slot_of_strides, token_of_strides = slot_of.stride()[:2], token_of.stride()[:2]
    referenced_strides, hand_strides = referenced.stride()[:2], hand.stride()
    assert slot_of.stride(2) == token_of.stride(2) == referenced.stride(2) == 1, "slots are contiguous"
    seats = rows.seats.contiguous()
    limits = [t.contiguous() for t in (rows.capacities, rows.protected_below, rows.protected_from)]
    columns = min(COLUMNS, triton.next_power_of_2(num_columns))
    look_up[(num_places,)](
        slot_of,
        referenced,
        seats,
        required,
        slots,
        missed.view(torch.uint8),
        num_missed,
        num_heads,
        num_columns,
        *slot_of_strides,
        *referenced_strides,
        *required.stride(),
        COLUMNS=columns,
        num_warps=4,
    )
    count[(num_tiles, num_places)](
        token_of,
        referenced,
        hand,
        seats,
        *limits,
        num_missed,
        counts,
        num_heads,
        *token_of_strides,
        *referenced_strides,
        *hand_strides,
        TILE=TILE,
        num_warps=8,
    )
    take[(num_places,)](
        slot_of,
        token_of,
        referenced,
        hand,
        seats,
        *limits,
        required,
        slots,
        missed.view(torch.uint8),
        num_missed,
        counts,
        victims,
        num_heads,
        num_columns,
        num_tiles,
        *slot_of_strides,
        *token_of_strides,
        *referenced_strides,
        *hand_strides,
        *required.stride(),
        TILE=TILE,
        TILES=triton.next_power_of_2(num_tiles),
        COLUMNS=columns,
        num_warps=8,
    )
    return slots, missed
