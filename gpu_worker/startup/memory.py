"""The memory plan: how much of a GPU's memory is left for slots after everything else that will be allocated.

Sizes of state come from the classes that allocate it, on PyTorch's meta device. Temporary memory of kernels and
captured steps is bounded from above.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch

from gpu_worker.caches.recall.fixed_slots import FixedSlots
from gpu_worker.caches.recall.hot_cache import HotCache
from gpu_worker.caches.recall.index_training import index_bytes
from gpu_worker.caches.recall.snapshots import SeenRows
from gpu_worker.caches.retain.kept_slots import KeptSlots
from gpu_worker.errors import ConfigError
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.policies.base import CacheShape, Family
from gpu_worker.policies.registry import LONG
from gpu_worker.policies.retain import RetainPolicy
from gpu_worker.runner.prompts.captured import short_pass_bytes
from gpu_worker.runner.prompts.prompt_memory import prefill_bytes
from gpu_worker.runner.steps.graphs import GRAPH_LAYER_BYTES, MAX_GRAPHS
from gpu_worker.runner.workload import Workload
from gpu_worker.state.batch import Buckets
from gpu_worker.state.sequence import ring_size
from gpu_worker.state.slot_pool import BlockTables, SlotPool, num_blocks

# A CUDA context and its code, at most, where it cannot be distinguished from what other processes hold.
CONTEXT_BYTES = 1 << 30
# Code that is loaded later, the workspaces of libraries, and gaps between allocations.
LIBRARY_BYTES = 512 << 20
# Scores, ranks and marks of a candidate while a step selects.
CANDIDATE_BYTES = 16
# Tokens decoded by a sequence with compressed layers, for which its state has space at once.
FEW_DECODED = 1024
# Copies of a slot's position and score while a policy chooses what to evict.
EVICTION_BYTES = 32
# Copies of a row's logits while it is sampled: sorted values, their indices, sums.
LOGIT_BYTES = 24
# Indexes of policies that some request may name get memory within this share of what is left; beyond it such a request
# is refused.
OTHERS_SHARE = 0.1
# Where seats are not asked for: of the bytes that seats, indexes and steps take slots have so many at least.
SLOT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of device memory in addition to the weights.

    seats: block tables, residency, fixed slots, slab tables.
    indexes: of the default policy, and of as many others as fit in `OTHERS_SHARE`: the one that `auto` takes, then the
    smallest.
    prefill: one prompt of the greatest length, and captured passes of short ones.
    decode: steps of a full batch, captured ones and libraries included.
    slots: the pool.
    """

    seats: int
    indexes: int
    prefill: int
    decode: int
    slots: int

    @property
    def reserved(self) -> int:
        """All but the slots."""
        return self.seats + self.indexes + self.prefill + self.decode

    @classmethod
    def of(cls, workload: Workload, available: int, slot_bytes: int | None = None) -> MemoryPlan:
        """Split `available` bytes; `slot_bytes`: the pool's size where it is fixed.

        Raises ConfigError where no request of the greatest length fits, or the fixed pool does not.
        """
        seats, decode = seat_bytes(workload), decode_bytes(workload)
        prefill = prefill_bytes(workload) + short_pass_bytes(workload)
        default = workload.default
        indexes = index_bytes(default, workload.policy_shape) if workload.has_indexes else 0
        rest = available - seats - prefill - decode - indexes
        least = least_slot_bytes(workload) if slot_bytes is None else slot_bytes
        likely_others = workload.likely_others if workload.has_indexes else ()
        sizes = {policy.name: index_bytes(policy, workload.policy_shape) for policy in likely_others}
        others = _within(min(OTHERS_SHARE * rest, rest - least), sizes)
        indexes, rest = indexes + others, rest - others
        plan = cls(seats, indexes, prefill, decode, rest if slot_bytes is None else slot_bytes)
        if rest < least:
            raise ConfigError(
                f"{least - rest} bytes of device memory are missing: beside the weights {_mib(available)} are free, "
                f"seats take {_mib(seats)}, indexes {_mib(plan.indexes)}, a prompt {_mib(prefill)}, steps "
                f"{_mib(decode)}, and slots need {_mib(least)}; give less with --max-num-seqs or --max-model-len, or "
                "more with --gpu-memory-limit"
            )
        return plan


def fitting_seats(workload: Workload, available: int, most: int, most_selecting: int) -> CacheShape:
    """Return the shape with as many seats as a device has room for: `most`, half of it, and so on; of these
    `most_selecting` for requests that may select, half of it, and so on, until slots have `SLOT_SHARE` of what seats,
    indexes and steps take. One seat where nothing fits.

    available: bytes of the device beside the weights, whether or not they are free now, so that a worker that is
    started again has as many.
    """
    for seats in _halves(most):
        for selecting in _halves(min(seats, most_selecting)):
            shape = replace(workload.shape, max_num_seqs=seats, num_selecting=selecting)
            plan = _plan(replace(workload, shape=shape), available)
            if plan is not None and plan.slots >= SLOT_SHARE * (plan.seats + plan.indexes + plan.decode):
                return shape
    return replace(workload.shape, max_num_seqs=1, num_selecting=1)


def fitting_selecting(workload: Workload, available: int) -> CacheShape:
    """Return the shape with as many of its seats for requests that may select as a plan has room for: all, half of
    them, and so on; one where nothing fits."""
    for selecting in _halves(workload.shape.max_num_seqs):
        shape = replace(workload.shape, num_selecting=selecting)
        if fits(replace(workload, shape=shape), available):
            return shape
    return replace(workload.shape, num_selecting=1)


def fits(workload: Workload, available: int) -> bool:
    """Return whether a plan has room for one request of the greatest length."""
    return _plan(workload, available) is not None


def _halves(most: int) -> Iterator[int]:
    while most:
        yield most
        most //= 2


def _plan(workload: Workload, available: int) -> MemoryPlan | None:
    try:
        return MemoryPlan.of(workload, available)
    except ConfigError:
        return None


def _within(limit: float, sizes: Mapping[str, int]) -> int:
    """The sum of as many sizes as stay within the limit: of the policy that `auto` takes, then the smallest."""
    total = 0
    for name in sorted(sizes, key=lambda name: (name != LONG, sizes[name])):
        if total + sizes[name] <= limit:
            total += sizes[name]
    return total


def available_bytes(device: torch.device, limit: int | None) -> int:
    """Bytes that this process may still allocate on a CUDA device, under the limit if there is one."""
    torch.cuda.empty_cache()
    free, _total = torch.cuda.mem_get_info(device)
    if limit is None:
        return int(free)
    return int(min(free, limit - context_bytes(device) - torch.cuda.memory_reserved(device)))


def total_bytes(device: torch.device, limit: int | None) -> int:
    """Return the bytes of a CUDA device beside what this process has allocated, under the limit if there is one,
    whoever holds them now."""
    total = limit or torch.cuda.mem_get_info(device)[1]
    return int(total - context_bytes(device) - torch.cuda.memory_reserved(device))


def context_bytes(device: torch.device) -> int:
    """Device memory that CUDA itself holds for this process."""
    free, total = torch.cuda.mem_get_info(device)
    return int(min(total - free - torch.cuda.memory_reserved(device), CONTEXT_BYTES))


def limit_process(device: torch.device, limit: int) -> None:
    """Limit PyTorch's allocations so that the process stays under the limit. Raises ConfigError."""
    own = context_bytes(device) + LIBRARY_BYTES // 2
    if limit <= own:
        raise ConfigError(
            f"--gpu-memory-limit {limit} is {own - limit + 1} bytes below what CUDA takes for itself; give more"
        )
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, (limit - own) / total), device)


def seat_bytes(workload: Workload) -> int:
    """State of every seat that does not depend on the policy."""
    shape = replace(workload.shape, device=torch.device("meta"))
    pool = SlotPool(1, shape.row_format, shape.device)
    max_slots = shape.max_model_len + BLOCK_SIZE
    tables = BlockTables(pool, shape.max_num_seqs, shape.num_layers, shape.num_kv_heads, max_slots)
    of_policies = replace(workload.policy_shape, device=shape.device)
    fixed = FixedSlots(of_policies)
    for policy in workload.policies.values():
        plan = workload.plan(policy)
        if plan.selects and policy.family is Family.RECALL:
            fixed.make_room(plan.num_sink + ring_size(policy, plan))
    # Slabs have 64 tokens at least, mostly. While the fixed slots are widened, the old ones are there too.
    slab_tables = shape.max_num_seqs * shape.num_layers * (shape.max_model_len // 64 + 1) * 4
    hot = HotCache(of_policies, pool, tables)
    kept = _kept_bytes(workload, of_policies)
    seen = SeenRows(of_policies).num_bytes
    return tables.tables.nbytes + hot.num_bytes + 3 * fixed.table.nbytes // 2 + slab_tables + kept + seen


def _kept_bytes(workload: Workload, shape: CacheShape) -> int:
    """The retain cache's state of every seat's slots, if that is the default family."""
    most_kept = workload.most_kept
    if not most_kept:
        return 0
    kept = KeptSlots(shape)
    policy = cast(RetainPolicy, workload.default)
    kept.make_room(most_kept + (1 if policy.evicts else FEW_DECODED), has_notes=True)
    return kept.num_bytes


def index_room(workload: Workload, available: int, slot_bytes: int) -> int | None:
    """Bytes for the indexes of all policies next to a pool of this size, in so much memory; None where the pool is not
    from a plan, and the bytes are unknown."""
    try:
        return MemoryPlan.of(workload, available, slot_bytes).indexes
    except ConfigError:
        return None


def decode_bytes(workload: Workload) -> int:
    """Steps of a full batch: once uncaptured and once captured, with what every captured one keeps."""
    model, shape = workload.model, workload.shape
    logits = shape.max_num_seqs * model.vocab_size
    num_selecting = workload.policy_shape.max_num_seqs
    candidates = num_selecting * shape.num_kv_heads * shape.max_model_len
    step = shape.max_num_seqs * workload.token_bytes + candidates * CANDIDATE_BYTES + logits * 6
    most_kept, policy = workload.most_kept, workload.default
    if most_kept and cast(RetainPolicy, policy).evicts:
        heads = num_selecting * shape.num_layers * shape.num_kv_heads
        step += heads * Buckets(is_exact=False).positions(most_kept + 1) * EVICTION_BYTES
    captured = MAX_GRAPHS * (logits * 4 + shape.num_layers * GRAPH_LAYER_BYTES)
    return 2 * step + captured + logits * LOGIT_BYTES + LIBRARY_BYTES


def least_slot_bytes(workload: Workload) -> int:
    """Slots of one request of the greatest length under the default policy and budget."""
    shape, policy = workload.shape, workload.default
    plan, slots, num_dense = workload.plan(policy), shape.max_model_len, shape.num_layers
    if policy.family is Family.RECALL and plan.selects and not plan.all_resident:
        num_dense = shape.num_layers - workload.policy_shape.num_layers
        needed = plan.num_sink + policy.max_window(plan) + 1 + (plan.num_selected or 0)
        slots = min(slots, needed)
    if policy.family is Family.RETAIN and plan.selects:
        num_dense = shape.num_layers - workload.policy_shape.num_layers
        # A head's last block may be nearly empty, however a layer's budget is dealt.
        slots = min(slots, plan.budget_tokens + 1) + BLOCK_SIZE
    blocks = num_dense * num_blocks(shape.max_model_len) + (shape.num_layers - num_dense) * num_blocks(slots)
    return blocks * BLOCK_SIZE * workload.head_layer_bytes


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
