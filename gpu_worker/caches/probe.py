"""Measures how good a selection was, against exact attention over every token; for evaluation only."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gpu_worker.policies.oracle.policy import exact_weights
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import Offloader

# Keys that one pass turns into float32: a long context of a large model is measured a few layers at a time.
MAX_KEY_ELEMENTS = 1 << 28


@dataclass(frozen=True, slots=True)
class Sighting:
    """The attended tokens of one sequence in one step, in L layers. query: [L, H_q, d]. newest: the new token's keys
    [L, H_kv, d]. positions, selected: int64 [L, H_kv, A], [L, H_kv, K], -1 pads."""

    sequence: Sequence
    query: Tensor
    newest: Tensor
    positions: Tensor
    selected: Tensor


@dataclass(slots=True)
class _Keys:
    """Keys seen so far: [L, H_kv, capacity, d], of which the first `num_tokens` are there."""

    keys: Tensor
    num_tokens: int


class Probe:
    """Adds attention mass and recalls of (layer, step) pairs to the meters; all layers of a step at once."""

    def __init__(self, offloader: Offloader, scale: float) -> None:
        self._offloader = offloader
        self._scale = scale
        # Fetching all keys at every step would dwarf the step.
        self._known: WeakKeyDictionary[Sequence, _Keys] = WeakKeyDictionary()

    def measure(self, layers: range, sightings: list[Sighting]) -> None:
        """Attention mass is the exact softmax weight on `positions`, the mean over query heads; recall rate the share
        of the exact top k candidates that `selected` found, the mean over KV heads (1 where nothing was selected). Best
        recall has no part in how a policy splits its budget: of the B tokens of highest exact weight, wherever they
        stand, the share that is among `positions`; B is the budget.
        """
        sums = torch.stack([self._sums(layers, sighting) for sighting in sightings])
        # One synchronisation a step.
        for sighting, (mass, recall, best) in zip(sightings, sums.tolist(), strict=True):
            meter = sighting.sequence.meter
            meter.num_measured += len(layers)
            meter.attention_mass += mass
            meter.recall_rate += recall
            meter.best_recall += best

    def _sums(self, layers: range, sighting: Sighting) -> Tensor:
        """Attention mass, recall rate and best recall, summed over the layers: float64 [3]."""
        keys = self._keys(layers, sighting)
        per_pass = max(1, MAX_KEY_ELEMENTS // keys[0].numel())
        num_tokens = torch.full((min(per_pass, len(layers)),), keys.shape[2], device=keys.device)
        mass, recall, best = [], [], []
        for begin in range(0, len(layers), per_pass):
            part = slice(begin, begin + per_pass)
            at_layers = keys[part]
            weights = exact_weights(
                sighting.query[part], at_layers, num_tokens[: at_layers.shape[0]], self._scale
            )
            mass.append(_mass(weights, sighting.positions[part]) / _group_size(sighting))
            recall.append(_recall(weights, sighting.sequence, sighting.selected[part]))
            best.append(_best_recall(weights, sighting.sequence, sighting.positions[part]))
        return torch.stack([torch.cat(mass), torch.cat(recall), torch.cat(best)]).double().sum(dim=1)

    def _keys(self, layers: range, sighting: Sighting) -> Tensor:
        """Keys of all tokens, the new one included: [L, H_kv, n, d]."""
        sequence, newest = sighting.sequence, sighting.newest
        known = self._known.get(sequence)
        if known is None or known.num_tokens != sequence.num_tokens:
            known = self._past(sequence, layers, newest)
            self._known[sequence] = known
        known.keys[:, :, sequence.num_tokens] = newest
        known.num_tokens = sequence.num_tokens + 1
        return known.keys[:, :, : known.num_tokens]

    def _past(self, sequence: Sequence, layers: range, newest: Tensor) -> _Keys:
        num_layers, num_kv_heads, head_dim = newest.shape
        keys = newest.new_empty(num_layers, num_kv_heads, sequence.capacity, head_dim)
        for place, layer in enumerate(layers):
            rows = self._offloader.inspect(sequence, layer, num_kv_heads)
            keys[place, :, : sequence.num_tokens] = rows[..., :head_dim]
        return _Keys(keys, sequence.num_tokens)


def _group_size(sighting: Sighting) -> int:
    return sighting.query.shape[1] // sighting.newest.shape[1]


def _mass(weights: Tensor, positions: Tensor) -> Tensor:
    """Weight on these positions, the mean over KV heads: [L]."""
    taken = weights.gather(2, positions.clamp(min=0)).masked_fill(positions < 0, 0)
    return taken.sum(dim=2).mean(dim=1)


def _recall(weights: Tensor, sequence: Sequence, selected: Tensor) -> Tensor:
    """Share of the best candidates that were selected, the mean over KV heads: [L]."""
    begin, end = sequence.plan.num_sink, sequence.window_begin
    num_best = min(sequence.plan.num_selected or 0, end - begin)
    if not num_best:
        return weights.new_ones(weights.shape[0])
    return _found(weights[:, :, begin:end].topk(num_best, dim=2).indices + begin, selected, weights)


def _best_recall(weights: Tensor, sequence: Sequence, positions: Tensor) -> Tensor:
    """Share of the budget's best tokens that were attended, the mean over KV heads: [L]."""
    num_best = min(sequence.plan.budget_tokens, weights.shape[2])
    return _found(weights.topk(num_best, dim=2).indices, positions, weights)


def _found(best: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """Share of `best` that is among `positions`, the mean over KV heads: [L]."""
    num_layers, num_kv_heads, num_tokens = weights.shape
    # Pads write to a column of their own.
    found = weights.new_zeros(num_layers, num_kv_heads, num_tokens + 1)
    found.scatter_(2, positions.where(positions >= 0, num_tokens), 1.0)
    return found.gather(2, best).mean(dim=(1, 2))
