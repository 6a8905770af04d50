"""StreamingLLM: attention sinks and the last tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.policies.base import Plan, attend_all, sink_tokens
from gpu_worker.policies.retain.base import LayerRows, Retained, RetainPolicy, Scores, StepSlots, keep_best


@dataclass(frozen=True, slots=True)
class StreamingLLM(RetainPolicy):
    """Sinks and a sliding window, at their own positions (Xiao et al., Efficient streaming language models with
    attention sinks, section 3.2; positions as in the ports of the papers that compare with it).

    num_sink: first tokens kept.
    """

    num_sink: int = 4

    name = "streaming_llm"
    evicts = True

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        num_sink = sink_tokens(self.num_sink, budget_tokens)
        num_recent = budget_tokens - num_sink
        if budget_tokens >= num_prompt_tokens:
            return attend_all(num_prompt_tokens, budget_tokens, num_sink, num_recent)
        return Plan(num_prompt_tokens, budget_tokens, num_sink, num_recent, num_selected=0)

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        none = torch.zeros(rows.keys.shape[0], dtype=torch.int64, device=rows.keys.device)
        return keep_best(rows, plan, Scores(torch.zeros_like(rows.positions, dtype=torch.float32)), none)

    def evict(self, slots: StepSlots) -> Tensor:
        # One has left the window since the last step.
        return slots.is_evictable.int().argmax(dim=-1)
