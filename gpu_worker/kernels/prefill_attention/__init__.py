"""Causal attention of one chunk of a prompt over everything before it, or of several prompts at once."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.kernels.prefill_attention import reference
from gpu_worker.kernels.prefill_attention.reference import Packed, attend_chunk_naive

attend_chunk = by_device(reference.attend_chunk)
attend_prompts = by_device(reference.attend_prompts)
plan_chunks = by_device(reference.plan_chunks)
reads_bounds = by_device(reference.reads_bounds)

__all__ = [
    "Packed",
    "attend_chunk",
    "attend_chunk_naive",
    "attend_prompts",
    "plan_chunks",
    "reads_bounds",
]
