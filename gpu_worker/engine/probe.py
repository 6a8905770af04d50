"""Measures how good a selection was, against exact attention over every token; for evaluation only."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.engine.offload import Offloader
from gpu_worker.engine.sequence import Sequence
from gpu_worker.policies.oracle import exact_weights


class Probe:
    """Adds attention mass and recall rate of single (layer, step) pairs to a sequence's meter."""

    def __init__(self, offloader: Offloader, scale: float) -> None:
        self._offloader = offloader
        self._scale = scale

    def measure(
        self,
        sequence: Sequence,
        layer: int,
        query: Tensor,
        newest: Tensor,
        positions: Tensor,
        selected: Tensor,
    ) -> None:
        """query: [H_q, d]. newest: the new token's row [H_kv, 2d]. positions, selected: [H_kv, A], [H_kv, k], -1 pads.

        Attention mass is the exact softmax weight on `positions`, the mean over query heads; recall rate the share of
        the exact top k candidates that `selected` found, the mean over KV heads (1 where nothing was selected).
        """
        num_kv_heads, head_dim = newest.shape[0], query.shape[-1]
        past = self._offloader.inspect(sequence, layer, num_kv_heads)
        keys = torch.cat([past, newest[:, None]], dim=1)[None, ..., :head_dim]
        num_tokens = torch.tensor([keys.shape[2]], device=keys.device)
        weights = exact_weights(query[None], keys, num_tokens, self._scale)[0]
        group_size = query.shape[0] // num_kv_heads
        mass = weights.gather(1, positions.clamp(min=0)).masked_fill(positions < 0, 0).sum(dim=1) / group_size
        sequence.meter.num_measured += 1
        sequence.meter.attention_mass += float(mass.mean())
        sequence.meter.recall_rate += self._recall(weights, sequence, selected)

    def _recall(self, weights: Tensor, sequence: Sequence, selected: Tensor) -> float:
        begin, end = sequence.plan.num_sink, sequence.window_begin
        num_selected = min(selected.shape[1], end - begin)
        if not num_selected:
            return 1.0
        best = weights[:, begin:end].topk(num_selected, dim=1).indices + begin
        found = torch.isin(
            best + weights.shape[1] * _head_ids(best), selected + weights.shape[1] * _head_ids(selected)
        )
        return float(found.float().mean())


def _head_ids(positions: Tensor) -> Tensor:
    return torch.arange(positions.shape[0], device=positions.device)[:, None]
