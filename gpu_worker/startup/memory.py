"""The memory plan: how much of a GPU's memory is left for slots after everything else that will be allocated.

Sizes of state come from the classes that allocate it, on PyTorch's meta device. Temporary memory of kernels and
captured steps is bounded from above.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import cast

import torch

from gpu_worker.caches.recall.hot_cache import residency_tensors
from gpu_worker.caches.recall.snapshots import SeenRows
from gpu_worker.errors import ConfigError
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.policies.base import CacheShape, Family, Policy
from gpu_worker.policies.recall import RecallPolicy
from gpu_worker.policies.retain import RetainPolicy
from gpu_worker.runner.prompts.captured import short_pass_bytes
from gpu_worker.runner.prompts.prompt_memory import prefill_bytes
from gpu_worker.runner.steps.graphs import GRAPH_LAYER_BYTES, MAX_GRAPHS
from gpu_worker.runner.workload import Workload
from gpu_worker.state.batch import MAX_SCORED, Buckets
from gpu_worker.state.seat_memory import seat_layout
from gpu_worker.state.sequence import ring_size
from gpu_worker.state.slot_pool import num_blocks

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
# Where seats are not asked for: slots have this share of the memory beside the weights.
SLOT_SHARE = 0.25
# Lengths that are tried are multiples of this.
UNIT_TOKENS = 1024
# Parts of pages that tensors of a seat leave empty.
PAGE_GAPS = 64 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of device memory in addition to the weights.

    prefill: one prompt of the greatest length, and captured passes of short ones.
    decode: steps of a full batch, captured ones and libraries included, and what every seat has, also an empty one.
    slots: the pool, of which requests take slots and what else grows with them.
    """

    prefill: int
    decode: int
    slots: int

    @classmethod
    def of(cls, workload: Workload, available: int, slot_bytes: int | None = None) -> MemoryPlan:
        """Split `available` bytes; `slot_bytes`: the pool's size where it is fixed.

        Raises ConfigError where no request of the greatest length fits, or the fixed pool does not.
        """
        decode = seat_bytes(workload) + decode_bytes(workload)
        prefill = prefill_bytes(workload) + short_pass_bytes(workload)
        rest = available - prefill - decode
        least = least_slot_bytes(workload) if slot_bytes is None else slot_bytes
        if rest < least:
            raise ConfigError(
                f"{least - rest} bytes of device memory are missing: beside the weights {_mib(available)} are free, a "
                f"prompt takes {_mib(prefill)}, steps {_mib(decode)}, and slots need {_mib(least)}; give less with "
                "--max-model-len or --max-num-seqs, or more with --gpu-memory-limit"
            )
        return cls(prefill, decode, rest if slot_bytes is None else slot_bytes)


def longest_fitting(workload: Workload, available: int) -> int:
    """Return the greatest length, a multiple of 1,024, of which a request fits; 0 where none does."""
    low, high = 0, workload.shape.max_model_len // UNIT_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if fits(workload.of_length(middle * UNIT_TOKENS), available):
            low = middle
        else:
            high = middle - 1
    return low * UNIT_TOKENS


def fitting_seats(workload: Workload, available: int, most: int) -> int:
    """Return as many seats as leave slots `SLOT_SHARE` of the memory: `most`, half of it, and so on; one where nothing
    fits. Only large vocabularies on small devices have fewer than most: an empty seat takes next to nothing.

    available: bytes of the device beside the weights, whether or not they are free now, so that a worker that is
    started again has as many.
    """
    seats = most
    while seats > 1:
        with contextlib.suppress(ConfigError):
            if MemoryPlan.of(workload.of_seats(seats), available).slots >= SLOT_SHARE * available:
                return seats
        seats //= 2
    return 1


def fits(workload: Workload, available: int) -> bool:
    """Return whether a plan has room for one request of the greatest length."""
    return least_bytes(workload) <= available


def least_bytes(workload: Workload) -> int:
    """Bytes beside the weights that a plan needs for one request of the greatest length."""
    steps = seat_bytes(workload) + decode_bytes(workload)
    return steps + prefill_bytes(workload) + short_pass_bytes(workload) + least_slot_bytes(workload)


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
    """Bytes that every seat has, also an empty one."""
    shape = workload.shape
    # Slabs have 64 tokens at least, mostly.
    slab_tables = shape.num_seats * shape.num_layers * (shape.max_model_len // 64 + 1) * 4
    seen = SeenRows(replace(workload.policy_shape, device=torch.device("meta"))).num_bytes
    return slab_tables + seen


def decode_bytes(workload: Workload) -> int:
    """Steps of a full batch: once uncaptured and once captured, with what every captured one keeps."""
    model, shape = workload.model, workload.shape
    logits = shape.max_num_seqs * model.vocab_size
    scored = min(shape.max_num_seqs * shape.max_model_len, max(MAX_SCORED, shape.max_model_len))
    step = shape.max_num_seqs * workload.token_bytes + workload.product_bytes + logits * 6
    step += scored * shape.num_kv_heads * CANDIDATE_BYTES
    most_kept, policy = workload.most_kept, workload.default
    if most_kept and cast(RetainPolicy, policy).evicts:
        heads = shape.max_num_seqs * workload.policy_shape.num_layers * shape.num_kv_heads
        step += heads * Buckets(is_exact=False).positions(most_kept + 1) * EVICTION_BYTES
    captured = MAX_GRAPHS * shape.num_layers * GRAPH_LAYER_BYTES
    return 2 * step + captured + logits * LOGIT_BYTES + LIBRARY_BYTES


def least_slot_bytes(workload: Workload) -> int:
    """The pool's bytes that one request of the greatest length takes under the default policy and budget."""
    shape, policy = workload.shape, workload.default
    plan, slots, num_dense = workload.plan(policy), shape.max_model_len, shape.num_layers
    is_sparse = plan.selects and not plan.all_resident
    if policy.family is Family.RECALL and is_sparse:
        num_dense = shape.num_layers - workload.policy_shape.num_layers
        needed = plan.num_sink + policy.max_window(plan) + 1 + (plan.num_selected or 0)
        slots = min(slots, needed)
    if policy.family is Family.RETAIN and plan.selects:
        num_dense = shape.num_layers - workload.policy_shape.num_layers
        # A head's last block may be nearly empty, however a layer's budget is dealt.
        slots = min(slots, plan.budget_tokens + 1) + BLOCK_SIZE
    blocks = num_dense * num_blocks(shape.max_model_len) + (shape.num_layers - num_dense) * num_blocks(slots)
    return blocks * BLOCK_SIZE * workload.head_layer_bytes + state_bytes(workload) + PAGE_GAPS


def state_bytes(workload: Workload) -> int:
    """Bytes of a seat's state beside its slots, for the greatest length under the default policy: block tables; of a
    policy that recalls index, residency and fixed slots; of one that retains what its slots hold."""
    shape, policy, of_policies = workload.shape, workload.default, workload.policy_shape
    heads, plan = shape.num_layers * shape.num_kv_heads, workload.plan(policy)
    tables = heads * (num_blocks(shape.max_model_len) + 1) * 8
    if not plan.selects:
        return tables
    policy_heads = of_policies.num_layers * of_policies.num_kv_heads
    if policy.family is Family.RETAIN:
        return tables + policy_heads * 2 * (workload.most_kept + FEW_DECODED) * 12
    if policy.family is not Family.RECALL:
        return tables
    fixed = 2 * (plan.num_sink + ring_size(policy, plan)) * 4
    num_slots = num_blocks(shape.max_model_len + BLOCK_SIZE) * BLOCK_SIZE
    residency = seat_layout(of_policies, lambda seated: residency_tensors(seated, num_slots)).num_bytes
    index = index_bytes(policy, of_policies) if workload.has_indexes else 0
    return tables + policy_heads * fixed + residency + index


def index_bytes(policy: Policy, shape: CacheShape) -> int:
    """Bytes of a seat's index under a policy that recalls."""
    return seat_layout(shape, cast(RecallPolicy, policy).allocate).num_bytes


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
