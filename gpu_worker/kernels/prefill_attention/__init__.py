"""Causal attention of one chunk of a prompt over everything before it."""

from gpu_worker.kernels.prefill_attention.reference import attend_chunk, attend_chunk_naive

__all__ = ["attend_chunk", "attend_chunk_naive"]
