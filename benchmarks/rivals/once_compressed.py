"""Retain policies for caches filled at random: one prompt is compressed, all others of its length copy its choice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

from torch import Tensor

from gpu_worker.policies.base import Family, Plan, Policy
from gpu_worker.policies.retain import LayerRows, Recompression, Retained, RetainPolicy
from gpu_worker.policies.wrapper import AllocationPolicy


def once_compressed(policy: Policy) -> Policy:
    """The policy; one that retains is cheap to fill many random prompts for."""
    if policy.family is not Family.RETAIN:
        return policy
    return OnceCompressed(cast(RetainPolicy, policy))


@dataclass(frozen=True, slots=True)
class _Kept:
    """What `Retained` has beside keys and values."""

    positions: Tensor
    notes: Tensor | None
    history: Tensor | None
    rounds: int


@dataclass(frozen=True, slots=True, eq=False)
class OnceCompressed(AllocationPolicy):
    """Asks the policy once for each length and layer budget. Every other prompt, and every other layer of that budget,
    keeps the same positions of its own random rows, with the same notes: the shapes are the policy's, of
    unequal heads too. What is compressed again while decoding is the policy's own work."""

    inner: RetainPolicy
    kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.inner.name

    def recompression(self, plan: Plan) -> Recompression | None:
        return self.inner.recompression(plan)

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        if rows.num_tokens > plan.num_prompt_tokens:
            return self.inner.compress(rows, plan, budget)
        key = rows.num_tokens, budget
        if key not in self.kept:
            first = self.inner.compress(rows, plan, budget)
            self.kept[key] = _Kept(first.positions, first.notes, first.history, first.rounds)
        kept = self.kept[key]
        # A prompt's rows lie at their positions.
        same = Retained.of(rows, kept.positions)
        return replace(same, notes=kept.notes, history=kept.history, rounds=kept.rounds)
