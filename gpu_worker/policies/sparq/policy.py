"""SparQ: the query's few largest channels approximate its inner products with every key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.policies.base import CacheShape, Plan, StepAttention, StepQueries, sink_tokens, split_budget
from gpu_worker.policies.recall import (
    Candidates,
    FixedKeys,
    Leaving,
    RecallPolicy,
    Selected,
    SelectingStep,
)
from gpu_worker.policies.sparq.value_means import ValueMeans, mixed

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class SparQIndex:
    """keys: [seats, L, H_kv, d, N] in their dtype, by position, a channel's values side by side. means: of all values,
    where they are mixed in."""

    keys: Tensor
    means: ValueMeans | None


@dataclass(frozen=True, slots=True)
class SparQ(RecallPolicy[SparQIndex]):
    """All tokens; the top k are recalled by some channels of the keys (Ribar et al., SparQ Attention, section 4).

    num_channels: r, how many are read at a step: those with the largest |q|, summed over the GQA group. 1 is what
    PQCache is compared with, 1/128 of the keys. num_sink, recent_ratio: as for PQCache. mean_value: the paper's third
    step, by which the mean of all values stands for what is not attended, weighed by the attention that it would have
    by the same approximate scores; off, as where PQCache compares, and `sparq+mean` with it.

    The second copy of the keys takes half as much again as the cache.
    """

    num_channels: int = 1
    num_sink: int = 32
    recent_ratio: float = 0.5
    mean_value: bool = False

    @property
    def name(self) -> str:
        return "sparq+mean" if self.mean_value else "sparq"

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        num_sink = sink_tokens(self.num_sink, budget_tokens)
        num_recent = int((budget_tokens - num_sink) * self.recent_ratio)
        return split_budget(num_prompt_tokens, budget_tokens, num_sink, num_recent)

    def allocate(self, shape: CacheShape) -> SparQIndex:
        keys = shape.seated(shape.head_dim, shape.max_model_len, dtype=shape.dtype)
        return SparQIndex(keys, ValueMeans(shape) if self.mean_value else None)

    def observe_prefill(
        self,
        index: SparQIndex,
        seat: int,
        layer: int,
        plan: Plan,
        keys: Tensor,
        values: Tensor,
        queries: Tensor,
    ) -> None:
        end = self.window_begin(plan, keys.shape[1])
        index.keys[seat, layer, :, :, :end] = keys[:, :end].transpose(1, 2)
        if index.means is not None:
            index.means.fill(seat, layer, values)

    def extend(self, index: SparQIndex, leaving: Leaving) -> None:
        seats, positions, keys = leaving.seats, leaving.positions, leaving.read_keys()
        at_layers = index.keys[:, leaving.layers.start : leaving.layers.stop]
        columns = positions.clamp(min=0)
        # A row without a token writes back what is there.
        old = at_layers[seats, :, :, :, columns]
        is_present = (positions >= 0)[:, None, None, None]
        at_layers[seats, :, :, :, columns] = keys.to(old.dtype).where(is_present, old)

    def attention(self, index: SparQIndex, step: SelectingStep) -> StepAttention:
        return step if index.means is None else _WithMean(self, index, index.means, step)

    def score(self, index: SparQIndex, candidates: Candidates) -> Tensor:
        weights = (
            self._scores(index, candidates, *self._reduced(index, candidates)).softmax(dim=-1).sum(dim=2)
        )
        return weights.masked_fill(candidates.outside()[:, None], float("-inf"))

    def missed(self, index: SparQIndex, attended: Selected, fixed_keys: FixedKeys) -> Tensor:
        """Share of the attention that candidates have which are not selected, by the approximate scores: float32
        [B, H_q], in [0, 1]."""
        candidates, selected = attended.candidates, attended.positions
        channels, query = self._reduced(index, candidates)
        scores = self._scores(index, candidates, channels, query)
        fixed = query @ fixed_keys.at(channels).transpose(-1, -2)
        fixed = fixed.masked_fill((fixed_keys.slots < 0)[:, :, None], float("-inf"))
        every = torch.cat([fixed, scores], dim=-1).logsumexp(dim=-1)
        # Pads mark a column of their own.
        num_positions = candidates.num_positions
        is_selected = torch.zeros(
            *selected.shape[:2], num_positions + 1, dtype=torch.bool, device=selected.device
        )
        is_selected.scatter_(2, selected.where(selected >= 0, num_positions), True)
        left_out = scores.masked_fill(is_selected[:, :, None, :num_positions], float("-inf")).logsumexp(
            dim=-1
        )
        # A row of padding may have no token at all.
        return (left_out - every).exp().nan_to_num(0.0).flatten(1)

    def _reduced(self, index: SparQIndex, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """The channels that are read, int64 [B, H_kv, r], and the queries in them, scaled: float32
        [B, H_kv, group, r]."""
        batch, _, head_dim = candidates.query.shape
        query = candidates.query.float().view(batch, index.keys.shape[2], -1, head_dim)
        magnitude = query.abs()
        # Of equals the lower channel.
        order = magnitude.sum(dim=2).argsort(dim=-1, descending=True, stable=True)
        channels = order[..., : self.num_channels]
        chosen = channels[:, :, None].expand(-1, -1, query.shape[2], -1)
        # A head's temperature grows with the share of its query that was left out.
        share = magnitude.gather(-1, chosen).sum(dim=-1) / magnitude.sum(dim=-1).clamp(min=EPS)
        scale = candidates.scale / share.clamp(min=EPS).sqrt()
        return channels, query.gather(-1, chosen) * scale[..., None]

    def _scores(self, index: SparQIndex, candidates: Candidates, channels: Tensor, query: Tensor) -> Tensor:
        """Approximate scores: float32 [B, H_kv, group, N], -inf for what is no candidate."""
        num_positions, heads = (
            candidates.num_positions,
            torch.arange(index.keys.shape[2], device=query.device),
        )
        at_layer = index.keys[:, candidates.layer, :, :, :num_positions]
        keys = at_layer[candidates.seats[:, None, None], heads[:, None], channels].float()
        return (query @ keys).masked_fill(candidates.outside()[:, None, None], float("-inf"))


class _WithMean(StepAttention):
    """What is selected is attended, and the mean of all values stands for what is not."""

    def __init__(self, policy: SparQ, index: SparQIndex, means: ValueMeans, step: SelectingStep) -> None:
        self._policy = policy
        self._index = index
        self._means = means
        self._step = step

    def attend(self, layer: int, queries: StepQueries) -> Tensor:
        step = self._step
        selected = step.select(layer, queries)
        attended = step.attend_selected(selected)
        missed = self._policy.missed(self._index, selected, step.fixed_keys(layer))
        seats = selected.candidates.seats
        means = self._means.take_in(seats, layer, step.positions, step.new_values(layer))
        return mixed(attended, means, missed)
