"""Longest contexts that the policy `auto` attends whole, by what the device can do."""

from __future__ import annotations

import torch

from gpu_worker.policies.base import CacheShape
from gpu_worker.records import Budget

# Tokens that are always few. On a CPU no more are: there attending is what costs.
FEW_TOKENS = 4096
# What scoring, top-k and finding the slots cost a layer, however few the tokens: launches, and passes over little data.
SELECTION_SECONDS = 60e-6
PROBE_BYTES = 128 << 20
NUM_PROBES = 10


def max_full_tokens(shape: CacheShape, budget: Budget, code_bytes: int, bytes_per_second: float) -> int:
    """Longest context, prompt and answer, for which a decode step is no slower when it attends all of it.

    A step reads, in each layer, n rows of every KV head; with a budget of b tokens b of them and n codes, and it spends
    SELECTION_SECONDS, which all sequences of the batch share: a full batch is what counts. code_bytes: of a
    token's code in one head.
    """
    fixed_bytes = bytes_per_second * SELECTION_SECONDS / shape.max_num_seqs
    row_bytes = shape.row_format.row_bytes
    per_token = row_bytes - code_bytes
    if budget.tokens is not None:
        fixed_bytes += shape.num_kv_heads * budget.tokens * row_bytes
    else:
        per_token -= int((budget.share or 1.0) * row_bytes)
    if per_token <= 0:
        return shape.max_model_len
    length = int(fixed_bytes / (shape.num_kv_heads * per_token))
    return min(shape.max_model_len, max(FEW_TOKENS, length))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes that a CUDA device reads and writes a second when it copies its memory."""
    source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(NUM_PROBES):
        target.copy_(source)
    end.record()
    end.synchronize()
    del source, target
    torch.cuda.empty_cache()
    return 2 * NUM_PROBES * PROBE_BYTES / (1e-3 * begin.elapsed_time(end))
