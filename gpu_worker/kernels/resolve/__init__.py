"""From token positions to slots: hits at once, misses on the slots of the least recently used tokens."""

from gpu_worker.kernels.resolve.reference import Residency, resolve

__all__ = ["Residency", "resolve"]
