"""Upper bound of a query's inner products with the keys of every page."""

from gpu_worker.kernels.page_bound.reference import page_bound

__all__ = ["page_bound"]
