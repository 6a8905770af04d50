"""Approximate attention weight of every candidate from product-quantised keys, and the codes of keys."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.policies.pqcache.pq_score import reference
from gpu_worker.policies.pqcache.pq_score.reference import augment, max_square_norms

__all__ = ["augment", "max_square_norms", "pq_assign", "pq_score"]

pq_assign = by_device(reference.pq_assign, "assign_kernel")
pq_score = by_device(reference.pq_score)
