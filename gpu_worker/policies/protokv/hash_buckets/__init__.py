"""Keys by hash of their direction, and the sums of what falls into each bucket."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.policies.protokv.hash_buckets import reference
from gpu_worker.policies.protokv.hash_buckets.reference import RandomFeatures

__all__ = ["RandomFeatures", "bucket_sums"]

bucket_sums = by_device(reference.bucket_sums)
