"""StreamingLLM: attention sinks and the last tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.policies.base import Plan
from gpu_worker.policies.hyper_parameters import Tokens
from gpu_worker.policies.retain import Evicted, LayerRows, StepSlots
from gpu_worker.policies.scored import ScoredPolicy, Scores


@dataclass(frozen=True, slots=True)
class StreamingLLM(ScoredPolicy):
    """Sinks and a sliding window (Xiao et al., StreamingLLM, section 3.2).

    num_sink: first tokens kept. What is kept has its positions in the text, as in the ports that papers compare with.
    """

    num_sink: Tokens = 4

    name = "streaming_llm"
    evicts = True

    def split(self, plan: Plan) -> Plan:
        return plan.split_by_ratio(self.num_sink, 1.0)

    def score(self, rows: LayerRows, plan: Plan) -> Scores:
        return Scores(torch.zeros_like(rows.positions, dtype=torch.float32))

    def evict(self, slots: StepSlots) -> Evicted:
        # One has left the window since the last step.
        return Evicted(slots.is_evictable.int().argmax(dim=-1))
