"""The indexes of every recall policy in use, by policy name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gpu_worker.policies.base import CacheShape, Plan
from gpu_worker.policies.recall.base import Candidates, IndexJob, RecallPolicy


class IndexBook:
    """Holds each policy's index state for all seats. A policy's state is made when its first request comes."""

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self._indexes: dict[str, Any] = {}

    def make(self, policy: RecallPolicy) -> None:
        """Have the policy's state."""
        self._index(policy)

    def _index(self, policy: RecallPolicy) -> Any:
        if policy.name not in self._indexes:
            self._indexes[policy.name] = policy.allocate(self._shape)
        return self._indexes[policy.name]

    def observe(
        self, policy: RecallPolicy, seat: int, layer: int, plan: Plan, keys: Tensor, queries: Tensor
    ) -> None:
        policy.observe_prefill(self._index(policy), seat, layer, plan, keys, queries)

    def load(
        self, policy: RecallPolicy, seat: int, layer: int, job: IndexJob, arrays: Mapping[str, Tensor]
    ) -> None:
        policy.load(self._index(policy), seat, layer, job, arrays)

    def extend(
        self, policy: RecallPolicy, seats: Tensor, layers: range, positions: Tensor, keys: Tensor
    ) -> None:
        policy.extend(self._index(policy), seats, layers, positions, keys)

    def select(self, policy: RecallPolicy, candidates: Candidates, counts: Tensor, width: int) -> Tensor:
        return policy.select(self._index(policy), candidates, counts, width)
