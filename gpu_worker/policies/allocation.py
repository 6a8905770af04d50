"""What an allocation is: it moves a retain policy's budget between layers or heads."""

from __future__ import annotations

from torch import Tensor

from gpu_worker.policies.base import Plan
from gpu_worker.policies.retain import Gift, LayerRows, Retained, RetainPolicy, StepSlots


class AllocationPolicy(RetainPolicy):
    """A policy that wraps another, `inner`, and is that policy in all that it does not override.

    An allocation between layers overrides `layer_budget`, one between heads `compress`. The one between layers goes
    outside, `LayerWise(AdaKV(SnapKV()))`: what is between heads needs a policy that scores.
    """

    inner: RetainPolicy

    @property
    def evicts(self) -> bool:  # type: ignore[override]
        return self.inner.evicts

    @property
    def observes(self) -> bool:  # type: ignore[override]
        return self.inner.observes

    @property
    def gives(self) -> bool:  # type: ignore[override]
        return self.inner.gives

    @property
    def has_degrees(self) -> bool:  # type: ignore[override]
        return self.inner.has_degrees

    @property
    def num_shifted(self) -> int:  # type: ignore[override]
        return self.inner.num_shifted

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        return self.inner.plan(num_prompt_tokens, budget_tokens)

    def num_queries(self, plan: Plan) -> int:
        return self.inner.num_queries(plan)

    def window_begin(self, plan: Plan, num_tokens: int) -> int:
        return self.inner.window_begin(plan, num_tokens)

    def max_window(self, plan: Plan) -> int:
        return self.inner.max_window(plan)

    def layer_budget(self, plan: Plan, layer: int, num_layers: int) -> int:
        return self.inner.layer_budget(plan, layer, num_layers)

    def most_kept(self, plan: Plan, budget: int, num_kv_heads: int) -> int:
        return self.inner.most_kept(plan, budget, num_kv_heads)

    def interval(self, plan: Plan) -> int:
        return self.inner.interval(plan)

    def mark(self, plan: Plan, num_left: int) -> int:
        return self.inner.mark(plan, num_left)

    def room(self, plan: Plan, num_decoded: int) -> int:
        return self.inner.room(plan, num_decoded)

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        return self.inner.compress(rows, plan, budget)

    def evict(self, slots: StepSlots) -> Tensor:
        return self.inner.evict(slots)

    def give(self, slots: StepSlots, evicted: Tensor) -> Gift:
        return self.inner.give(slots, evicted)

    def observe(self, scores: Tensor, weights: Tensor, marks: Tensor) -> None:
        self.inner.observe(scores, weights, marks)
