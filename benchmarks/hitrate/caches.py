"""Hot caches of several sizes held against a recorded selection: the clock as it is served, and exact LRU.

Nothing is attended: whether a position is resident follows from positions alone. All sizes are simulated at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.hitrate.cached_request import CachedRequest
from gpu_worker.kernels.resolve import Residency, SeatLanes, resolve


def clock_hits(positions: Tensor, request: CachedRequest, num_slots: Sequence[int]) -> Tensor:
    """Share of each step's selected positions that the engine's hot cache holds: float64 [sizes, steps].

    positions: int32 [steps, L, B, H_kv, K], of B sequences that are all alike to the cache. num_slots: of a (layer, KV
    head), each size a cache of its own. It begins as prefill leaves it, and each step places its new token first.
    """
    num_steps, _, batch, _, _ = positions.shape
    device, num_sizes = positions.device, len(num_slots)
    num_seats = num_sizes * batch
    capacities = torch.tensor(num_slots, device=device).repeat_interleave(batch)
    state = _prefilled(request, capacities.tolist(), positions.shape[1] * positions.shape[3], device)
    seats = torch.arange(num_seats, device=device)
    below = torch.full_like(seats, request.num_sink)
    hits = torch.empty(num_sizes, num_steps, dtype=torch.float64)
    for step, window_begin in enumerate(request.window_begins):
        rows = SeatLanes(seats, capacities, below, torch.full_like(seats, window_begin))
        new = torch.full((num_seats, state.hand.shape[1], 1), request.context + step, device=device)
        resolve(state, rows, new)
        required = _by_head(positions[step]).repeat(num_sizes, 1, 1)
        _, missed = resolve(state, rows, required)
        hits[:, step] = 1 - missed.view(num_sizes, -1).double().mean(dim=1).cpu()
    return hits


def lru_hits(positions: Tensor, request: CachedRequest, num_slots: Sequence[int]) -> Tensor:
    """As `clock_hits`, of a cache that evicts the least recently used.

    A token is used when it is selected, and at every step while it is in the window; before, the later of two tokens
    of the prompt is the more recent. Such a cache of any size holds the most recently used candidates, as many as it
    has room for beside sinks, window and the new token; so a position hits where it ranks below that room.
    """
    context, device = request.context, positions.device
    order = torch.arange(request.capacity, device=device)
    selected = _by_head(positions[0])
    used = order.repeat(*selected.shape[:2], 1)
    hits = torch.empty(len(num_slots), len(request.window_begins), dtype=torch.float64)
    for step, window_begin in enumerate(request.window_begins):
        selected = _by_head(positions[step])
        now, newest = (step + 1) * request.capacity, context + step
        used[..., window_begin : newest + 1] = now + order[window_begin : newest + 1]
        candidates = used[..., request.num_sink : window_begin].sort().values
        place = torch.searchsorted(candidates, used.gather(-1, selected))
        rank = candidates.shape[-1] - 1 - place
        num_others = request.num_sink + newest + 1 - window_begin
        for size, count in enumerate(num_slots):
            hits[size, step] = (rank < count - num_others).double().mean().cpu()
        used.scatter_(-1, selected, now + selected)
    return hits


def _by_head(step: Tensor) -> Tensor:
    """Of int32 [L, B, H_kv, K]: int64 [B, L * H_kv, K]. Layers are heads like others: none shares a slot."""
    return step.transpose(0, 1).flatten(1, 2).long()


def _prefilled(
    request: CachedRequest, num_slots: Sequence[int], num_heads: int, device: torch.device
) -> Residency:
    """A seat for each of `num_slots`, as prefill leaves it: sinks, and the last tokens as far as there is room."""
    size = (len(num_slots), num_heads)
    state = Residency(
        slot_of=torch.full((*size, request.capacity), -1, dtype=torch.int32, device=device),
        token_of=torch.full((*size, max(num_slots)), -1, dtype=torch.int32, device=device),
        referenced=torch.zeros(*size, max(num_slots), dtype=torch.uint8, device=device),
        hand=torch.zeros(size, dtype=torch.int32, device=device),
        filled=torch.zeros(size, dtype=torch.int32, device=device),
    )
    for seat, count in enumerate(num_slots):
        # the new token's slot stays free
        num_held = min(request.context, count - 1)
        sinks = torch.arange(request.num_sink, device=device)
        latest = torch.arange(request.context - (num_held - request.num_sink), request.context, device=device)
        held = torch.cat([sinks, latest])
        state.filled[seat] = num_held
        state.token_of[seat, :, :num_held] = held.int()
        state.slot_of[seat, :, held] = torch.arange(num_held, device=device).int()
    return state
