"""Decode attention over slots: block tables for contiguous ranges, slot lists for selected tokens."""

from gpu_worker.kernels.attention import reference
from gpu_worker.kernels.attention.reference import Rest
from gpu_worker.kernels.dispatch import by_device

__all__ = ["Rest", "attend_blocks", "attend_slots"]

attend_blocks = by_device(reference.attend_blocks)
attend_slots = by_device(reference.attend_slots)
