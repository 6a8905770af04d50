"""Attention of a decode step in which all that is before the window stands right before it."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.engine.row_inputs import RowInputs
from gpu_worker.kernels.attention import attend_slots
from gpu_worker.models import KeyShift


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
    [B, H_kv, K]. Rows of the pool stay as they are: a copy is turned, which costs as much again as to attend them.
    """
    num_fixed, head_dim = fixed.shape[2], query.shape[2]
    begin, end = rows.begin[:, None], rows.end[:, None]
    columns = torch.arange(num_fixed, device=query.device)
    # Sinks lie in the first columns, in their order; window tokens stay where they are.
    of_fixed = (end - columns).where(columns < begin, 0)[:, None].expand_as(fixed)
    distance = torch.cat([of_fixed, end[..., None] - positions], dim=-1)
    slots = torch.cat([fixed, selected], dim=-1)
    taken = pool[slots.clamp(min=0).long()]
    keys = key_shift.apply(taken[..., :head_dim], distance)
    near = torch.cat([keys, taken[..., head_dim:]], dim=-1).flatten(0, 2)
    own = torch.arange(slots.numel(), dtype=torch.int32, device=query.device).view_as(slots)
    own = own.where(slots >= 0, -1)
    every = torch.arange(query.shape[0], device=query.device)
    return attend_slots(query, near, own[..., :num_fixed], every, own[..., num_fixed:], scale)
