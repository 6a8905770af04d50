"""A request as the hot cache sees it, besides its selections: sizes, and where its window begins at each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_worker.caches import HotCacheSize
from gpu_worker.policies.base import Plan
from gpu_worker.policies.recall import RecallPolicy


@dataclass(frozen=True)
class CachedRequest:
    """A prompt of `context` tokens and a decode step for each of `window_begins`; step i's token is at context + i.

    capacity: tokens that it may ever hold. num_fixed: most slots for sinks, window and the new token. num_selected: K.
    """

    context: int
    capacity: int
    num_sink: int
    num_fixed: int
    num_selected: int
    window_begins: tuple[int, ...]

    @classmethod
    def of(cls, policy: RecallPolicy[Any], plan: Plan, num_steps: int) -> CachedRequest:
        """A request whose plan selects; it ends with the token that its last step samples."""
        context = plan.num_prompt_tokens
        return cls(
            context=context,
            capacity=context + num_steps + 1,
            num_sink=plan.num_sink,
            num_fixed=plan.num_sink + policy.max_window(plan) + 1,
            num_selected=plan.num_selected or 0,
            window_begins=tuple(policy.window_begin(plan, context + step) for step in range(num_steps)),
        )

    def num_slots(self, share: float) -> int:
        """All slots of a (layer, KV head) for C = `share` of the context, or for K where that is more."""
        size = HotCacheSize(share=share).num_slots(self.context, self.capacity, self.num_fixed, 0)
        return min(self.capacity, self.num_fixed + max(self.num_selected, size))

    def cache_tokens(self, share: float) -> int:
        """C in slots: those beside sinks, window and the new token."""
        return self.num_slots(share) - self.num_fixed
