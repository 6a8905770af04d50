"""Positions in order from two bits a position: the last launch of kernels that select without sorting."""

from gpu_worker.kernels.marks.kernel import write_marked

__all__ = ["write_marked"]
