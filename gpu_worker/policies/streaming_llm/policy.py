"""StreamingLLM: attention sinks and the last tokens, at positions in the text or in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.policies.base import CacheShape, Plan, StepAttention, attend_all, sink_tokens
from gpu_worker.policies.retain import Evicted, KeptStep, LayerRows, Retained, RetainPolicy, StepSlots
from gpu_worker.policies.scored import Scores, keep_best
from gpu_worker.policies.streaming_llm.sink_keys import SinkKeys


@dataclass(frozen=True, slots=True)
class StreamingLLM(RetainPolicy):
    """Sinks and a sliding window (Xiao et al., StreamingLLM, section 3.2).

    num_sink: first tokens kept. shift_positions: what is kept has the positions 0, 1, ... that it has in the cache, as
    in the paper, and bears the name `streaming_llm+shift`; else those in the text, as in the ports that papers compare
    with. Distances within the window are the same in both, so that sinks alone are moved.
    """

    num_sink: int = 4
    shift_positions: bool = False

    evicts = True

    @property
    def name(self) -> str:
        return "streaming_llm+shift" if self.shift_positions else "streaming_llm"

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        num_sink = sink_tokens(self.num_sink, budget_tokens)
        num_recent = budget_tokens - num_sink
        if budget_tokens >= num_prompt_tokens:
            return attend_all(num_prompt_tokens, budget_tokens, num_sink, num_recent)
        return Plan(num_prompt_tokens, budget_tokens, num_sink, num_recent, num_selected=0)

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        return keep_best(rows, plan, Scores(torch.zeros_like(rows.positions, dtype=torch.float32)))

    def evict(self, slots: StepSlots) -> Evicted:
        # One has left the window since the last step.
        return Evicted(slots.is_evictable.int().argmax(dim=-1))

    def allocate(self, shape: CacheShape) -> SinkKeys | None:
        return SinkKeys.of(shape, self.num_sink) if self.shift_positions else None

    def observe_prefill(
        self,
        state: SinkKeys | None,
        seat: int,
        layer: int,
        plan: Plan,
        keys: Tensor,
        values: Tensor,
        queries: Tensor,
    ) -> None:
        if state is not None:
            state.fill(seat, layer, keys)

    def attention(self, state: SinkKeys | None, step: KeptStep) -> StepAttention:
        if state is not None:
            # Once for all layers of the step.
            state.turn(step)
        return step
