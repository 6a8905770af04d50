"""What recall policies know of every seat: their indexes, by policy name, and the mean values that some add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gpu_worker.caches.recall.value_means import ValueMeans, mixed
from gpu_worker.policies.base import CacheShape, Plan
from gpu_worker.policies.recall import Candidates, IndexJob, ReadKeys, RecallPolicy
from gpu_worker.state.row_inputs import RowInputs


class IndexBook:
    """Holds each policy's index state for all seats. A policy's state is made when its first request comes."""

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self._indexes: dict[str, Any] = {}
        self._means: ValueMeans | None = None

    def make(self, policy: RecallPolicy) -> None:
        """Have the policy's state."""
        self.of(policy)
        if policy.mixes_mean:
            self._value_means()

    def _value_means(self) -> ValueMeans:
        if self._means is None:
            self._means = ValueMeans(self._shape)
        return self._means

    def of(self, policy: RecallPolicy) -> Any:
        if policy.name not in self._indexes:
            self._indexes[policy.name] = policy.allocate(self._shape)
        return self._indexes[policy.name]

    def observe(
        self, policy: RecallPolicy, seat: int, layer: int, plan: Plan, rows: Tensor, queries: Tensor
    ) -> None:
        """A prefilled layer: rows [H_kv, n, 2d]."""
        head_dim = self._shape.head_dim
        policy.observe_prefill(self.of(policy), seat, layer, plan, rows[..., :head_dim], queries)
        if policy.mixes_mean:
            self._value_means().fill(seat, layer, rows[..., head_dim:])

    def load(
        self,
        policy: RecallPolicy,
        seat: int,
        layer: int,
        job: IndexJob,
        arrays: Mapping[str, Tensor],
        read_keys: ReadKeys | None = None,
    ) -> None:
        policy.load(self.of(policy), seat, layer, job, arrays, read_keys)

    def extend(
        self, policy: RecallPolicy, seats: Tensor, layers: range, positions: Tensor, keys: Tensor
    ) -> None:
        policy.extend(self.of(policy), seats, layers, positions, keys)

    def select(self, policy: RecallPolicy, candidates: Candidates, counts: Tensor, width: int) -> Tensor:
        return policy.select(self.of(policy), candidates, counts, width)

    def mixed(
        self,
        policy: RecallPolicy,
        candidates: Candidates,
        selected: Tensor,
        rows: RowInputs,
        new_values: Tensor,
        attended: Tensor,
    ) -> Tensor:
        """What was attended [B, H_q, d], and the mean value for what was not. new_values: [B, H_kv, d]."""
        missed = policy.missed(self.of(policy), candidates, selected)
        means = self._value_means().take_in(rows.seats, candidates.layer, rows.positions, new_values)
        return mixed(attended, means, missed)
