"""The k best candidates of every head, ties defined."""

from gpu_worker.kernels.top_k.reference import top_k

__all__ = ["top_k"]
