"""Product-quantised codes of the tokens that leave the window, written into the index."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.policies.pqcache.pq_append import reference

pq_append = by_device(reference.pq_append)
