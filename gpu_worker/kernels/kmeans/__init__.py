"""The two halves of a K-means round over many problems: whose point, and the sums of each cluster's points."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.kernels.kmeans import reference

_KERNEL = "gpu_worker.kernels.kmeans.kernel"

assign_points = by_device(reference.assign_points, _KERNEL, "assign_points")
sum_members = by_device(reference.sum_members, _KERNEL, "sum_members")

__all__ = ["assign_points", "sum_members"]
