"""The slots of an engine that is measured: what its sequences need, or what the engine's memory plan leaves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from benchmarks.errors import NotMeasurable
from gpu_worker.caches.layer_map import LayerMap
from gpu_worker.errors import ConfigError
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.models import LoadedModel
from gpu_worker.policies.base import CacheShape, Family, Plan, Policy
from gpu_worker.policies.retain import RetainPolicy
from gpu_worker.records import Budget, IndexDevice
from gpu_worker.runner.workload import Workload
from gpu_worker.startup.assemble import cache_shape
from gpu_worker.startup.memory import PAGE_GAPS, MemoryPlan, state_bytes
from gpu_worker.state.sequence import ring_size
from gpu_worker.state.slot_pool import block_bytes, blocks_of_heads, num_blocks


@dataclass(frozen=True)
class Slots:
    """num_bytes: of the pool. hot_tokens: slots of each layer and KV head of a sequence that recalls, beside those of
    its sinks and window."""

    num_bytes: int
    hot_tokens: int


@dataclass(frozen=True)
class House:
    """`batch` sequences of one policy, of `context` tokens each and at most `capacity`, in an engine of their own."""

    model: LoadedModel
    policy: Policy
    budget: Budget
    batch: int
    context: int
    capacity: int
    prefill_chunk: int

    @property
    def plan(self) -> Plan:
        return self.policy.plan(self.context, self.budget.resolve(self.context))

    @property
    def shape(self) -> CacheShape:
        return cache_shape(self.model, self.batch, self.capacity)

    def slots(self, limit: int | None, index_device: IndexDevice) -> Slots:
        """limit: of device memory, in bytes. Raises NotMeasurable where the sequences do not fit it side by side."""
        every = num_blocks(self.capacity)
        wanted, state = self.batch * self._sequence_blocks(every), self._state_bytes(index_device)
        if limit is None:
            return Slots(wanted * self._block_bytes + state, every * BLOCK_SIZE)
        room = (self.room_beside_slots(limit, index_device) - state) // self._block_bytes
        if wanted <= room:
            return Slots(wanted * self._block_bytes + state, every * BLOCK_SIZE)
        per_head = room // (self.batch * self._num_heads)
        hot_tokens = per_head * BLOCK_SIZE - self._num_fixed
        if not self._may_miss or hot_tokens < (self.plan.num_selected or 0):
            raise NotMeasurable(
                f"{self.batch} sequences need {wanted * self._block_bytes} bytes of slots, and the limit leaves "
                f"{room * self._block_bytes}"
            )
        num_bytes = self.batch * self._num_heads * per_head * self._block_bytes
        return Slots(num_bytes + state, hot_tokens)

    def _sequence_blocks(self, every: int) -> int:
        """Return the blocks of one sequence that misses nothing."""
        plan, shape, heads = self.plan, self.shape, self.shape.num_kv_heads
        if self.policy.family is not Family.RETAIN or not plan.selects:
            return self._num_heads * every
        policy = cast(RetainPolicy, self.policy)
        room = policy.room(plan, self.capacity - self.context)
        budgets = (policy.layer_budget(plan, layer, shape.num_layers) for layer in range(shape.num_layers))
        return sum(blocks_of_heads(heads, budget + room) for budget in budgets)

    @property
    def _num_heads(self) -> int:
        return self.shape.num_layers * self.shape.num_kv_heads

    @property
    def _may_miss(self) -> bool:
        recalls = self.policy.family is Family.RECALL and self.plan.selects
        return recalls and not self.plan.all_resident

    @property
    def _num_fixed(self) -> int:
        return self.plan.num_sink + ring_size(self.policy, self.plan)

    @property
    def _block_bytes(self) -> int:
        return block_bytes(self.shape.row_format)

    def room_beside_slots(self, limit: int, index_device: IndexDevice) -> int:
        """Bytes of the pool that the engine would take within the limit. Raises NotMeasurable where there are none."""
        available = limit - self._taken_bytes()
        try:
            plan = MemoryPlan.of(self._workload(index_device), available, slot_bytes=0)
        except ConfigError as error:
            raise NotMeasurable(str(error)) from error
        return available - plan.prefill - plan.decode

    def _state_bytes(self, index_device: IndexDevice) -> int:
        """Bytes of the pool that the sequences take beside slots, where pages are counted."""
        if self.shape.device.type != "cuda":
            return 0
        return self.batch * (state_bytes(self._workload(index_device)) + PAGE_GAPS)

    def _workload(self, index_device: IndexDevice) -> Workload:
        return Workload(
            model=self.model.config,
            shape=self.shape,
            dtype=self.shape.dtype,
            policies={self.policy.name: self.policy},
            default_policy=self.policy.name,
            default_budget=self.budget,
            prefill_chunk=self.prefill_chunk,
            layers=LayerMap.with_full(self.shape.num_layers),
            index_device=index_device,
        )

    def _taken_bytes(self) -> int:
        """The weights, and what PyTorch keeps beside them."""
        if self.shape.device.type == "cuda":
            return torch.cuda.memory_reserved(self.shape.device)
        return self.model.num_parameters * self.shape.dtype.itemsize
