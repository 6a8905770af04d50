"""Tells requests that asked for it, now and then, which tokens their decode steps attended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.caches import CacheSet
from gpu_worker.caches.snapshots import LanePlace, Snapshot
from gpu_worker.device import Mark, to_host
from gpu_worker.records import AttentionEvent, Event
from gpu_worker.state.batch import Batch
from gpu_worker.state.sequence import Sequence

MAX_BUCKETS = 512
# Layers x KV heads x buckets of an event: 128 KiB of it.
MAX_CELLS = 1 << 15
# Between two looks, at least; and so many times what the last one took of the host: it gets 2 % of the time.
INTERVAL_SECONDS = 0.125
REST = 49
# Looks with counts on their way from the device.
MAX_PENDING = 4


@dataclass(frozen=True, slots=True)
class _Look:
    """A look at one step. attended, on_device: int16 [L, H_kv, buckets] of tokens, once `copied` is reached; None: all.
    window_begin: as the step attended it."""

    sequence: Sequence
    snapshot: Snapshot
    bucket_tokens: int
    num_tokens: int
    step: int
    window_begin: int
    attended: Tensor | None
    on_device: Tensor | None
    copied: Mark


class AttentionViews:
    """Inspects one request at a time, the one that was inspected longest ago. Without such requests a step costs a test
    of each sequence; without free device memory a look is skipped."""

    def __init__(
        self, caches: CacheSet, num_kv_heads: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """clock: in seconds."""
        self._caches = caches
        self._num_kv_heads = num_kv_heads
        self._clock = clock
        # Of the host, for all looks so far.
        self.spent_seconds = 0.0
        self._next = 0.0
        self._order: deque[Sequence] = deque()
        self._pending: deque[_Look] = deque()

    def after_step(self, batch: Batch) -> list[tuple[str, Event]]:
        """Look, if it is time, right after a step, when its new tokens count as past. Returns the events of earlier
        looks that have come, by request."""
        watched = [one for one in batch.sequences if one.request.attention]
        if not watched and not self._pending:
            return []
        begun = self._clock()
        has_come = bool(self._pending) and self._pending[0].copied.is_reached
        is_due = bool(watched) and begun >= self._next and len(self._pending) < MAX_PENDING
        events: list[tuple[str, Event]] = []
        while self._pending and self._pending[0].copied.is_reached:
            look = self._pending.popleft()
            # Unless it ended, or was preempted, since.
            if look.sequence.is_prefilled:
                events.append((look.sequence.sequence_id, self._event(look)))
        if is_due:
            self._look(self._whose_turn(watched), batch)
            self._next = begun + INTERVAL_SECONDS
        if has_come or is_due:
            now = self._clock()
            self.spent_seconds += now - begun
            self._next = max(self._next, now) + REST * (now - begun)
        return events

    def _whose_turn(self, watched: list[Sequence]) -> Sequence:
        self._order = deque(one for one in self._order if one in watched)
        known = set(self._order)
        self._order.extendleft(one for one in watched if one not in known)
        self._order.rotate(-1)
        return self._order[-1]

    def _look(self, sequence: Sequence, batch: Batch) -> None:
        bucket_tokens = bucket_size(sequence.num_tokens)
        num_buckets = -(-sequence.num_tokens // bucket_tokens)
        most = max(1, MAX_CELLS // (self._num_kv_heads * num_buckets))
        try:
            snapshot = self._caches.snapshot(sequence, _place_of(sequence, batch), most)
            if snapshot is None:
                return
            attended = _counts(snapshot.attended, bucket_tokens, num_buckets)
            on_device = (
                attended
                if snapshot.on_device is snapshot.attended
                else _counts(snapshot.on_device, bucket_tokens, num_buckets)
            )
        except torch.OutOfMemoryError:
            return
        look = _Look(
            sequence,
            snapshot,
            bucket_tokens,
            sequence.num_tokens,
            sequence.num_output,
            sequence.window_begin,
            None if attended is None else to_host(attended),
            None if on_device is None else to_host(on_device),
            Mark(self._caches.block_tables.tables.device),
        )
        self._pending.append(look)

    def _event(self, look: _Look) -> AttentionEvent:
        sequence = look.sequence
        usage = sequence.usage()
        attended = look.attended
        if attended is not None and look.snapshot.has_fixed:
            num_sink, end = sequence.plan.num_sink, look.num_tokens
            fixed = _overlap(0, num_sink, look) + _overlap(max(num_sink, look.window_begin), end, look)
            attended = attended + torch.from_numpy(fixed)
        return AttentionEvent(
            step=look.step,
            context_tokens=look.num_tokens,
            bucket_tokens=look.bucket_tokens,
            layers=look.snapshot.layers,
            kv_heads=self._num_kv_heads,
            attended=_bytes(attended),
            on_device=_bytes(look.on_device),
            host_tokens=look.num_tokens if sequence.offloads else 0,
            shared_tokens=sequence.num_cached,
            family=sequence.policy.family.value,
            dense_layers=look.snapshot.layers[0] if attended is not None else 0,
            hit_rate=usage.hit_rate,
            bytes_moved=usage.bytes_moved,
            policy=usage.policy,
            budget_tokens=usage.budget_tokens,
            attended_tokens=usage.attended_tokens,
        )


def bucket_size(num_tokens: int) -> int:
    """The least power of two that makes at most `MAX_BUCKETS` of so many tokens."""
    return 1 << (max(0, -(-num_tokens // MAX_BUCKETS) - 1)).bit_length()


def _place_of(sequence: Sequence, batch: Batch) -> LanePlace:
    first = 0
    for shape, members in zip(batch.shape.groups, batch.members, strict=True):
        if sequence in members:
            return LanePlace(shape, first, members.index(sequence))
        first += shape.num_lanes
    raise LookupError(f"{sequence.sequence_id} took no part in the step")


def _counts(positions: Tensor | None, bucket_tokens: int, num_buckets: int) -> Tensor | None:
    """How many of these positions, int [L, H_kv, A], -1 pads, lie in each bucket: int16 [L, H_kv, buckets]."""
    if positions is None:
        return None
    # The last column takes the pads, and is left out.
    buckets = (
        (positions // bucket_tokens).clamp(max=num_buckets).long().masked_fill(positions < 0, num_buckets)
    )
    counts = torch.zeros((*positions.shape[:2], num_buckets + 1), dtype=torch.int32, device=positions.device)
    counts.scatter_add_(2, buckets, torch.ones_like(buckets, dtype=torch.int32))
    return counts[..., :-1].to(torch.int16)


def _overlap(begin: int, end: int, look: _Look) -> npt.NDArray[np.int16]:
    """Tokens of [begin, end) in each bucket: int16 [buckets]."""
    starts = np.arange(0, look.num_tokens, look.bucket_tokens)
    inside = np.minimum(starts + look.bucket_tokens, end) - np.maximum(starts, begin)
    return inside.clip(min=0).astype(np.int16)


def _bytes(counts: Tensor | None) -> bytes:
    return b"" if counts is None else counts.numpy().astype("<u2").tobytes()
