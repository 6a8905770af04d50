"""From token positions to slots: hits at once, misses on the slots of the least recently used tokens."""

from gpu_worker.kernels.resolve.reference import Misses, Residency, SeatRows, claim, lookup, resolve

__all__ = ["Misses", "Residency", "SeatRows", "claim", "lookup", "resolve"]
