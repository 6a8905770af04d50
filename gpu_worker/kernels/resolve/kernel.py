"""The hot cache's clock on the GPU, in one launch and without the host.

`resolve_head`, a program for each (lane, head), looks up its positions. Where some miss, it walks the ring from the
hand on, tile by tile, until enough victims are found, commonly in the first or second tile; then it writes the new
entries. A head's ring is its own, so programs share nothing. A program is bound by the latency of a few dependent
reads: it has as many threads as there are columns, and a tile of the ring is eight slots of each.

A new token's slots in all layers are one column of many heads: thousands of programs of one warp.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.resolve.programs import resolve_head
from gpu_worker.kernels.resolve.reference import Residency, SeatLanes

# Positions and slots of the ring that a program handles at a time, at most.
COLUMNS = 2048
TILE = 2048
COLUMNS_PER_WARP = 128
TILE_PER_WARP = 256
MAX_WARPS = 8


def resolve(residency: Residency, rows: SeatLanes, required: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference: the same slots, misses and state, to the bit. `required` may have any strides."""
    slots = torch.empty(required.shape, dtype=torch.int64, device=required.device)
    missed = torch.empty(required.shape, dtype=torch.bool, device=required.device)
    victims = torch.empty(required.shape, dtype=torch.int32, device=required.device)
    batch, num_heads, num_columns = required.shape
    if required.numel() == 0:
        return slots, missed
    slot_of, token_of, referenced = residency.slot_of, residency.token_of, residency.referenced
    assert slot_of.stride(2) == token_of.stride(2) == referenced.stride(2) == 1, "slots are contiguous"
    of_seats = (rows.seats, rows.capacities, rows.protected_below, rows.protected_from)
    columns = triton.next_power_of_2(num_columns)
    num_warps = min(MAX_WARPS, max(1, columns // COLUMNS_PER_WARP))
    resolve_head[(batch * num_heads,)](
        slot_of,
        token_of,
        referenced,
        residency.hand,
        residency.filled,
        *(field.contiguous() for field in of_seats),
        required,
        slots,
        missed.view(torch.uint8),
        victims,
        num_heads,
        num_columns,
        *slot_of.stride()[:2],
        *token_of.stride()[:2],
        *referenced.stride()[:2],
        *residency.hand.stride(),
        *residency.filled.stride(),
        *required.stride(),
        # A thread to a column at least: no two of them hold the same one.
        COLUMNS=min(COLUMNS, max(32, columns)),
        TILE=min(TILE, TILE_PER_WARP * num_warps),
        num_warps=num_warps,
    )
    return slots, missed
