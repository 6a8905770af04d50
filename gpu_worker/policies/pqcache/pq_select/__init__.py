"""Scoring and selection in one: the best candidates by product-quantised keys of two parts."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.policies.pqcache.pq_select import reference

pq_select = by_device(reference.pq_select)
