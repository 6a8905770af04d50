"""Times of prompts' quanta on the device."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from gpu_worker.device import Mark
from gpu_worker.records.plans import Measured, WorkKind


class _Span(NamedTuple):
    begun: Mark
    ended: Mark
    work: float
    kind: WorkKind


class QuantumTimes:
    """Marks the quanta of each iteration, and measures them once the device is past them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[_Span] = []
        # Of one iteration each.
        self._queued: deque[list[_Span]] = deque()

    def begin(self) -> Mark:
        """Return the mark from which the next quantum counts: where the one before ended."""
        return self._spans[-1].ended if self._spans else Mark(self._device)

    def end(self, begun: Mark, work: float, kind: WorkKind) -> None:
        """Note a quantum that is queued; work: its floating-point operations, more than 0."""
        self._spans.append(_Span(begun, Mark(self._device), work, kind))

    def settle(self) -> list[Measured]:
        """End an iteration. Waits until the device has no more than one iteration's prompts before it: what arrives
        would wait behind all that is queued. Returns what was measured."""
        if self._spans:
            self._queued.append(self._spans)
            self._spans = []
        measured: list[Measured] = []
        while self._queued and (len(self._queued) > 1 or self._queued[0][-1].ended.is_reached):
            done = self._queued.popleft()
            done[-1].ended.wait()
            measured += [
                Measured(span.work, span.kind, span.ended.seconds_since(span.begun)) for span in done
            ]
        return measured
