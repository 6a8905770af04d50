"""Measures how good a selection was, against exact attention over every token; for evaluation only."""

from __future__ import annotations

from weakref import WeakKeyDictionary

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
        # Keys seen so far, [H_kv, n, d] of each layer: fetching all of them at every step would dwarf the step.
        self._keys: WeakKeyDictionary[Sequence, dict[int, Tensor]] = WeakKeyDictionary()

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
        keys = torch.cat(
            [self._past(sequence, layer, num_kv_heads, head_dim), newest[:, None, :head_dim]], dim=1
        )
        self._keys[sequence][layer] = keys
        num_tokens = torch.tensor([keys.shape[1]], device=keys.device)
        weights = exact_weights(query[None], keys[None], num_tokens, self._scale)[0]
        group_size = query.shape[0] // num_kv_heads
        mass = weights.gather(1, positions.clamp(min=0)).masked_fill(positions < 0, 0).sum(dim=1) / group_size
        sequence.meter.num_measured += 1
        sequence.meter.attention_mass += float(mass.mean())
        sequence.meter.recall_rate += self._recall(weights, sequence, selected)

    def _past(self, sequence: Sequence, layer: int, num_kv_heads: int, head_dim: int) -> Tensor:
        """Keys of the tokens before the new one."""
        known = self._keys.setdefault(sequence, {}).get(layer)
        if known is not None and known.shape[1] == sequence.num_tokens:
            return known
        return self._offloader.inspect(sequence, layer, num_kv_heads)[..., :head_dim]

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
