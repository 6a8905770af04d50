"""Decode attention over slots: block tables for contiguous ranges, slot lists for selected tokens."""

from gpu_worker.kernels.attention import reference
from gpu_worker.kernels.dispatch import by_device

_KERNEL = "gpu_worker.kernels.attention.kernel"

attend_blocks = by_device(reference.attend_blocks, _KERNEL, "attend_blocks")
attend_slots = by_device(reference.attend_slots, _KERNEL, "attend_slots")

__all__ = ["attend_blocks", "attend_slots"]
