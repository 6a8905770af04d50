"""Temporary GPU memory of prompts: to be computed, scored, stored, indexed and compressed."""

from __future__ import annotations

from typing import cast

import torch

from gpu_worker.engine.prompt_room import PromptRoom
from gpu_worker.kernels.prefill_attention.reference import MAX_SCORES
from gpu_worker.policies.base import Family
from gpu_worker.policies.observed import MAX_WEIGHTS
from gpu_worker.policies.recall import RecallPolicy
from gpu_worker.policies.retain import RetainPolicy
from gpu_worker.records import IndexDevice
from gpu_worker.runner.workload import Workload
from gpu_worker.store.layer_copies import STAGE_BYTES

# Where so few tokens follow on a known prefix, copying each layer to the arena by itself takes the host longer than the
# device computes it.
FEW_TOKENS = 512
# Of logits that score a prompt, float32, at once; on a GPU of so many tokens at least: for few the head's weights take
# as long to read.
LOGIT_BYTES = 8 << 20
GPU_TOKENS = 128
# Logits as the head gives them and as float32, and what puts them in order: whole numbers, at last of twice their size.
COPIES = 6


def prefill_bytes(workload: Workload) -> int:
    """Hidden states, and two layers' rows, of all prompts in progress; all layers' of few tokens behind a known prefix;
    staging buffers to write rows and to read them; and the largest temporary of one prompt."""
    model, shape, itemsize = workload.model, workload.shape, workload.dtype.itemsize
    length, chunk = shape.max_model_len, min(workload.prefill_chunk, shape.max_model_len)
    rows = length * workload.head_layer_bytes
    a_token = model.hidden_size * itemsize + 2 * workload.head_layer_bytes + 3 * 8
    num_tokens = PromptRoom(length, workload.prefill_chunk).total
    num_queries = min(num_tokens, workload.policy_shape.max_num_seqs * workload.num_queries)
    kept = num_tokens * a_token + 2 * STAGE_BYTES
    kept += min(FEW_TOKENS, length) * shape.num_layers * workload.head_layer_bytes
    kept += num_queries * model.num_heads * model.head_dim * itemsize
    # Rows that the hot cache keeps, and their slots: five int64 for each row of a head.
    storing = rows + 5 * 8 * shape.num_kv_heads * length
    keys = 4 * shape.num_kv_heads * length * shape.head_dim
    storing += max(_training_bytes(workload), _policy_bytes(workload, keys))
    computing = chunk * workload.token_bytes + workload.product_bytes
    if workload.dtype == torch.float32 or shape.head_dim > 256:
        computing += 2 * keys + 2 * 4 * min(MAX_SCORES, chunk * model.num_heads * length)
    return kept + max(storing, computing, scoring_bytes(chunk, model.vocab_size))


def _training_bytes(workload: Workload) -> int:
    """The most that training needs, of all policies that are trained on the device."""
    policies = [workload.default, *workload.likely_others]
    return max(
        (
            layer_training_bytes(workload, cast(RecallPolicy, policy))
            for policy in policies
            if policy.family is Family.RECALL
        ),
        default=0,
    )


def layer_training_bytes(workload: Workload, policy: RecallPolicy) -> int:
    """Most bytes alive in addition to one layer's keys of the longest prompt while its index is trained, and loaded; 0
    where the store does that."""
    plan, shape = workload.plan(policy), workload.shape
    job = policy.prompt_job(plan, plan.num_sink, shape.max_model_len)
    helps = workload.index_device is IndexDevice.AUTO and job is not None and job.is_quick
    if job is None or not (helps or workload.index_device is IndexDevice.GPU):
        return 0
    size = (shape.num_kv_heads, shape.max_model_len, shape.head_dim)
    keys = torch.empty(size, dtype=workload.dtype, device="meta")
    return policy.training_bytes(keys, job) + policy.load_bytes(shape.num_kv_heads * shape.max_model_len)


def _policy_bytes(workload: Workload, keys: int) -> int:
    """The default policy's temporaries for a prefilled layer with keys of so many bytes as float32."""
    model, num_queries = workload.model, workload.num_queries
    queries = num_queries * model.num_heads
    # Scores, masks and weights of some queries, and weights of those before; a copy of all queries, by group.
    weighing = 4 * 4 * min(MAX_WEIGHTS, queries * workload.shape.max_model_len)
    weighing += queries * model.head_dim * workload.dtype.itemsize
    if not workload.most_kept:
        return weighing
    policy = cast(RetainPolicy, workload.default)
    return max(weighing + 2 * keys, policy.key_copies * keys)


def scoring_bytes(num_tokens: int, vocab_size: int) -> int:
    """The most of a GPU's memory that is alive at once to score so many tokens."""
    return COPIES * 4 * vocab_size * min(num_tokens, scored_at_once(vocab_size, is_cuda=True))


def scored_at_once(vocab_size: int, is_cuda: bool) -> int:
    return max(GPU_TOKENS if is_cuda else 1, LOGIT_BYTES // (4 * vocab_size))
