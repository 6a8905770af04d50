"""H2O: heavy hitters by accumulated attention, and the last tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.policies.base import Plan, StepAttention
from gpu_worker.policies.hyper_parameters import SplitShare, Tokens
from gpu_worker.policies.observed import observed_weight
from gpu_worker.policies.retain import Evicted, KeptStep, LayerRows, Observing, StepSlots
from gpu_worker.policies.scored import ScoredPolicy, Scores

# H2O(C) may attend what a recall method spends on codes, a 128th of the keys it reads past.
COMPENSATION = 128


@dataclass(frozen=True, slots=True)
class H2O(ScoredPolicy):
    """The tokens with the most weight so far, and a window (Zhang et al., H2O, section 4).

    A KV head takes the mean over its group, which ranks as the sum does. Early tokens are seen by more queries and
    gather more, as published.

    num_sink: first tokens, always kept. recent_ratio: the window's share of all other kept tokens.
    """

    num_sink: Tokens = 0
    recent_ratio: SplitShare = 0.5

    name = "h2o"
    evicts = True

    def split(self, plan: Plan) -> Plan:
        return plan.split_by_ratio(self.num_sink, self.recent_ratio)

    def num_queries(self, plan: Plan) -> int:
        return plan.num_prompt_tokens

    def score(self, rows: LayerRows, plan: Plan) -> Scores:
        gathered = observed_weight(rows)
        return Scores(gathered, notes=gathered)

    def evict(self, slots: StepSlots) -> Evicted:
        if slots.notes is None:
            raise ValueError("H2O evicts by what it has observed: give StepSlots.notes")
        scores = slots.notes.masked_fill(~slots.is_evictable, float("inf"))
        is_least = scores == scores.amin(dim=-1, keepdim=True)
        # Slots are reused, so that the first is not the oldest.
        return Evicted(slots.positions.masked_fill(~is_least, torch.iinfo(torch.int64).max).argmin(dim=-1))

    def attention(self, step: KeptStep) -> StepAttention:
        return Observing(step, self.observe)

    @staticmethod
    def observe(notes: Tensor, weights: Tensor, marks: Tensor) -> None:
        notes.add_(weights)


@dataclass(frozen=True, slots=True)
class H2OCompensated(H2O):
    """As H2O with sinks and a budget raised by PQCache's index (Zhang et al., PQCache, section 4.1.3).

    Choice PQ-A1.
    num_sink: as for PQCache. The plan's budget is the raised one, a 128th of the prompt behind the sinks above the
    request's.
    """

    num_sink: Tokens = 32

    name = "h2o_c"

    def split(self, plan: Plan) -> Plan:
        more = max(0, plan.num_prompt_tokens - self.num_sink) // COMPENSATION
        raised = Plan.unsplit(plan.num_prompt_tokens, plan.num_kept + more)
        return super(H2OCompensated, self).split(raised)
