"""Approximate attention weight of every candidate from product-quantised keys."""

from gpu_worker.kernels.pq_score.reference import pq_assign, pq_score

__all__ = ["pq_assign", "pq_score"]
