"""The workload an engine is sized for: the model, the number and length of requests, and their usual policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch

from gpu_worker.caches.layer_map import POLICY, LayerMap
from gpu_worker.models import ModelConfig
from gpu_worker.policies.base import CacheShape, Family, Plan, Policy
from gpu_worker.policies.registry import ablations
from gpu_worker.policies.retain import RetainPolicy
from gpu_worker.records import Budget, IndexDevice


@dataclass(frozen=True, slots=True)
class Workload:
    """The memory plan follows from it. default_policy: of requests that name none; not `auto`."""

    model: ModelConfig
    shape: CacheShape
    dtype: torch.dtype
    policies: Mapping[str, Policy]
    default_policy: str
    default_budget: Budget
    prefill_chunk: int
    layers: LayerMap
    index_device: IndexDevice
    # On the device; else the store has them, and selects.
    has_indexes: bool = True
    # Temporary bytes of a projection in addition to its inputs and outputs.
    product_bytes: int = 0

    @property
    def default(self) -> Policy:
        return self.policies[self.default_policy]

    def of_length(self, max_model_len: int) -> Workload:
        """Return the same with another greatest length."""
        return replace(self, shape=replace(self.shape, max_model_len=max_model_len))

    def of_seats(self, max_num_seqs: int) -> Workload:
        """Return the same with so many requests at once."""
        return replace(self, shape=replace(self.shape, max_num_seqs=max_num_seqs))

    @property
    def likely_others(self) -> list[Policy]:
        """Policies other than the default one that requests may name; no ablations."""
        others = self.policies.keys() - ablations().keys() - {self.default_policy}
        return [self.policies[name] for name in others]

    @property
    def policy_shape(self) -> CacheShape:
        """The layers that policies serve."""
        return self.shape.part(self.layers.layers_of(POLICY))

    def plan(self, policy: Policy) -> Plan:
        """Return the plan of the longest prompt with the default budget."""
        length = self.shape.max_model_len
        return policy.plan(length, self.default_budget.resolve(length))

    @property
    def head_layer_bytes(self) -> int:
        """One token's rows in one layer."""
        return self.shape.num_kv_heads * self.shape.row_format.row_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token needs while a layer is computed: about three copies of each of its activations."""
        model = self.model
        projected = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        widest = max(layer.mlp.width for layer in model.layers)
        return 3 * self.dtype.itemsize * (2 * model.hidden_size + projected + widest)

    @property
    def num_queries(self) -> int:
        """Queries of a layer of the longest prompt that the default policy reads."""
        plan = self.plan(self.default)
        return self.default.num_queries(plan) if plan.selects else 0

    @property
    def most_kept(self) -> int:
        """Tokens that one head keeps at most under the default policy; 0 if that is of another family or refuses its
        budget."""
        policy, shape = self.default, self.shape
        plan = self.plan(policy)
        if policy.family is not Family.RETAIN or not plan.selects:
            return 0
        retain, num_layers = cast(RetainPolicy, policy), self.policy_shape.num_layers
        try:
            budgets = [retain.layer_budget(plan, layer, num_layers) for layer in range(num_layers)]
        except ValueError:
            # So is every such request.
            return 0
        return max((retain.most_kept(plan, budget, shape.num_kv_heads) for budget in budgets), default=0)
