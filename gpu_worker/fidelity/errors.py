"""Output errors of measured requests, gathered on the device step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_worker.state.sequence import Sequence


@dataclass(slots=True)
class _Sum:
    """A request's errors in one layer, summed over steps: float64 [H_q]."""

    errors: Tensor
    num_steps: int = 0


@dataclass(slots=True)
class OutputErrors:
    """By request and layer: how far each query head's output was from exact attention, as `Probe.watch` tells it."""

    _sums: dict[str, dict[int, _Sum]] = field(default_factory=dict)

    def note(self, sequence: Sequence, layers: range, errors: Tensor) -> None:
        """errors: float32 [L, H_q]."""
        of_request = self._sums.setdefault(sequence.sequence_id, {})
        for layer, row in zip(layers, errors.double(), strict=True):
            of_layer = of_request.setdefault(layer, _Sum(torch.zeros_like(row)))
            of_layer.errors += row
            of_layer.num_steps += 1

    def take(self, request_id: str) -> tuple[tuple[float, ...], ...] | None:
        """Means over the steps of a request, by layer and query head, of layers that are not dense; None for one that
        was not measured. Asked once: they are forgotten then."""
        sums = self._sums.pop(request_id, None)
        if sums is None:
            return None
        means = torch.stack([sums[layer].errors / sums[layer].num_steps for layer in sorted(sums)])
        return tuple(map(tuple, means.tolist()))
