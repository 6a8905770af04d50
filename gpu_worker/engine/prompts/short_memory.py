"""GPU memory of captured passes of short prompts."""

from __future__ import annotations

import torch

from gpu_worker.engine.prompts.short_batch import BUCKETS, MAX_PROMPTS, buckets_within
from gpu_worker.engine.steps.graphs import GRAPH_LAYER_BYTES
from gpu_worker.engine.workload import Workload

# Logits of the pass, float32 and as they were, and a copy of them.
LOGIT_BYTES = 10


def short_pass_bytes(workload: Workload) -> int:
    """Rows of all layers of the largest pass, temporaries, and the graphs; 0 where nothing is captured. Sizes captured
    the smallest first take twice the largest one's temporaries, which are less than half of `token_bytes`."""
    shape = workload.shape
    if workload.dtype == torch.float32 or shape.head_dim > 256:
        return 0
    buckets = buckets_within(min(workload.prefill_chunk, shape.max_model_len))
    most = buckets[-1] if buckets else BUCKETS[0]
    rows = most * shape.num_layers * workload.head_layer_bytes
    logits = MAX_PROMPTS * workload.model.vocab_size * LOGIT_BYTES
    return rows + most * workload.token_bytes + logits + len(buckets) * shape.num_layers * GRAPH_LAYER_BYTES
