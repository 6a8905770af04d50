"""Attention of a decode step in which all that is before the window stands right before it."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.kernels.attention import attend_slots
from gpu_worker.models import KeyShift
from gpu_worker.state.row_inputs import RowInputs


def attend_clamped(
    query: Tensor,
    pool: Tensor,
    fixed: Tensor,
    selected: Tensor,
    positions: Tensor,
    rows: RowInputs,
    key_shift: KeyShift,
    scale: float,
) -> Tensor:
    """As `attend_slots`, but sinks and selected tokens have the position where the window begins.

    query: [B, H_q, d]. fixed: int32 [B, H_kv, F], each row's own. selected: int32 [B, H_kv, K], at the positions int64
    [B, H_kv, K]. Rows of the pool stay as they are: a copy is turned, of one KV head at a time, as it takes several
    times the memory of what is attended.
    """
    group, num_kv_heads = query.shape[1] // fixed.shape[1], fixed.shape[1]
    begin, end = rows.begin[:, None], rows.end[:, None]
    columns = torch.arange(fixed.shape[2], device=query.device)
    # Sinks lie in the first columns, in their order; window tokens stay where they are.
    of_fixed = (end - columns).where(columns < begin, 0)
    every = torch.arange(query.shape[0], device=query.device)
    attended = []
    for head in range(num_kv_heads):
        distance = torch.cat([of_fixed, end - positions[:, head]], dim=-1)
        slots = torch.cat([fixed[:, head], selected[:, head]], dim=-1)
        near = _turned(pool[slots.clamp(min=0).long()], distance, key_shift)
        own = torch.arange(slots.numel(), dtype=torch.int32, device=query.device).view_as(slots)
        own = own.where(slots >= 0, -1)[:, None]
        of_head = query[:, head * group : (head + 1) * group]
        lists = own[..., : fixed.shape[2]], every, own[..., fixed.shape[2] :]
        attended.append(attend_slots(of_head, near.flatten(0, 1), *lists, scale))
    return torch.cat(attended, dim=1)


def _turned(taken: Tensor, distance: Tensor, key_shift: KeyShift) -> Tensor:
    """Rows [B, A, 2d] whose keys stand so many positions later, int64 [B, A]."""
    keys, values = taken.chunk(2, dim=-1)
    return torch.cat([key_shift.apply(keys, distance), values], dim=-1)
