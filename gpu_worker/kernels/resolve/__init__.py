"""From token positions to slots: hits at once, misses on the slots of the least recently used tokens."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.kernels.resolve import reference
from gpu_worker.kernels.resolve.reference import Residency, SeatLanes

resolve = by_device(reference.resolve)

__all__ = ["Residency", "SeatLanes", "resolve"]
