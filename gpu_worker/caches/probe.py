"""Measures how good a selection was, against exact attention over every token; for evaluation only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gpu_worker.kernels.top_k import top_k
from gpu_worker.policies.oracle.policy import exact_weights
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import Offloader

# Elements that one pass turns into float32: a long context of a large model is measured a few layers at a time.
MAX_ELEMENTS = 1 << 28


@dataclass(frozen=True, slots=True)
class Observation:
    """The attended tokens of one sequence in one step, in L layers. query: [L, H_q, d]. newest: the new token's keys
    and values [L, H_kv, 2d]. output: of its attention, [L, H_q, d]. positions, selected: int64 [L, H_kv, A],
    [L, H_kv, K], -1 pads."""

    sequence: Sequence
    query: Tensor
    newest: Tensor
    output: Tensor
    positions: Tensor
    selected: Tensor


@dataclass(slots=True)
class _Rows:
    """Keys seen so far, and values where they are asked for: [L, H_kv, capacity, d or 2d], of which the first
    `num_tokens` are there."""

    rows: Tensor
    num_tokens: int


class Probe:
    """Adds attention mass and recalls of (layer, step) pairs to the meters; all layers of a step at once."""

    def __init__(self, offloader: Offloader, scale: float, kept: tuple[int, ...]) -> None:
        """kept: the arena's numbers of the layers that policies serve."""
        self._offloader = offloader
        self._kept = kept
        self._scale = scale
        # Fetching all rows at every step would dwarf the step.
        self._known: WeakKeyDictionary[Sequence, _Rows] = WeakKeyDictionary()
        # Sees the output errors of a measured sequence's step in some layers, as policies number them, float32 [L,
        # H_q]; None: not asked for.
        self.watch: Callable[[Sequence, range, Tensor], None] | None = None

    def measure(self, observations: list[Observation]) -> None:
        """Attention mass is the exact softmax weight on `positions`, the mean over query heads; recall rate the share
        of the exact top k candidates that `selected` found, the mean over KV heads (1 where nothing was selected). Best
        recall has no part in how a policy splits its budget: of the B tokens of highest exact weight, wherever they
        stand, the share that is among `positions`; B is the budget.
        """
        sums = torch.stack([self._sums(observation) for observation in observations])
        # One synchronisation a step.
        for observation, (mass, recall, best) in zip(observations, sums.tolist(), strict=True):
            meter = observation.sequence.meter
            meter.num_measured += len(self._kept)
            meter.attention_mass += mass
            meter.recall_rate += recall
            meter.best_recall += best

    def _sums(self, observation: Observation) -> Tensor:
        """Attention mass, recall rate and best recall, summed over the layers: float64 [3]."""
        layers, rows = range(len(self._kept)), self._rows(observation)
        head_dim = observation.query.shape[-1]
        per_pass = max(1, MAX_ELEMENTS // rows[0].numel())
        num_tokens = torch.full((min(per_pass, len(layers)),), rows.shape[2], device=rows.device)
        mass, recall, best = [], [], []
        for begin in range(0, len(layers), per_pass):
            part = slice(begin, begin + per_pass)
            keys, query = rows[part, :, :, :head_dim], observation.query[part]
            weights = exact_weights(query, keys, num_tokens[: keys.shape[0]], self._scale)
            mass.append(_mass(weights, observation.positions[part]) / _group_size(observation))
            recall.append(_recall(weights, observation.sequence, observation.selected[part]))
            best.append(_best_recall(weights, observation.sequence, observation.positions[part]))
            if self.watch is not None:
                errors = output_errors(query, rows[part], observation.output[part], self._scale)
                self.watch(observation.sequence, layers[part], errors)
        return torch.stack([torch.cat(mass), torch.cat(recall), torch.cat(best)]).double().sum(dim=1)

    def _rows(self, observation: Observation) -> Tensor:
        """Return the rows of all tokens, the new one included: [L, H_kv, n, d], or 2d where values are asked for."""
        sequence, newest = observation.sequence, observation.newest
        width = observation.query.shape[-1] if self.watch is None else newest.shape[-1]
        known = self._known.get(sequence)
        if known is None or known.num_tokens != sequence.num_tokens:
            known = self._past(sequence, newest[..., :width])
            self._known[sequence] = known
        known.rows[:, :, sequence.num_tokens] = newest[..., :width]
        known.num_tokens = sequence.num_tokens + 1
        return known.rows[:, :, : known.num_tokens]

    def _past(self, sequence: Sequence, newest: Tensor) -> _Rows:
        num_layers, num_kv_heads, width = newest.shape
        rows = newest.new_empty(num_layers, num_kv_heads, sequence.capacity, width)
        for place, layer in enumerate(self._kept):
            past = self._offloader.host.inspect(sequence, layer, num_kv_heads)
            rows[place, :, : sequence.num_tokens] = past[..., :width]
        return _Rows(rows, sequence.num_tokens)


def _group_size(observation: Observation) -> int:
    return observation.query.shape[1] // observation.newest.shape[1]


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
    return _found(_best(weights[:, :, begin:end], num_best) + begin, selected, weights)


def _best_recall(weights: Tensor, sequence: Sequence, positions: Tensor) -> Tensor:
    """Share of the budget's best tokens that were attended, the mean over KV heads: [L]."""
    num_best = min(sequence.plan.budget_tokens, weights.shape[2])
    return _found(_best(weights, num_best), positions, weights)


def _best(weights: Tensor, count: int) -> Tensor:
    """Find each head's `count` largest weights, ties by the rule that selections follow: int64 [L, H_kv, count]."""
    counts = torch.full((weights.shape[0],), count, device=weights.device)
    # NaN is never taken: then pads are left, for which any place will do.
    return top_k(weights, counts, count).clamp(min=0)


def _found(best: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """Share of `best` that is among `positions`, the mean over KV heads: [L]."""
    num_layers, num_kv_heads, num_tokens = weights.shape
    # Pads write to a column of their own.
    found = weights.new_zeros(num_layers, num_kv_heads, num_tokens + 1)
    found.scatter_(2, positions.where(positions >= 0, num_tokens), 1.0)
    return found.gather(2, best).mean(dim=(1, 2))


def output_errors(query: Tensor, rows: Tensor, output: Tensor, scale: float) -> Tensor:
    """Distance of each query head's attention output from that over every token: |output - exact| / |exact|, by L2,
    float32 [L, H_q].

    query, output: [L, H_q, d]. rows: keys and values of all tokens, the new one included, [L, H_kv, n, 2d].
    """
    num_layers, num_heads, head_dim = query.shape
    keys, values = rows.float().split(head_dim, dim=-1)
    grouped = query.float().view(num_layers, rows.shape[1], -1, head_dim)
    weights = (grouped @ keys.transpose(-1, -2) * scale).softmax(dim=-1)
    exact = (weights @ values).view(num_layers, num_heads, head_dim)
    tiny = torch.finfo(exact.dtype).tiny
    return (output.float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=tiny)
