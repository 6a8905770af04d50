"""Decode attention over slots: block tables for contiguous ranges, slot lists for selected tokens."""

from gpu_worker.kernels.attention.reference import attend_blocks, attend_slots

__all__ = ["attend_blocks", "attend_slots"]
