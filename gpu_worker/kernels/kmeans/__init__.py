"""The two halves of a K-means round over many problems: assign points, and move centroids."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.kernels.kmeans import reference
from gpu_worker.kernels.kmeans.reference import Centroids, cluster_sizes, sort_members

assign_points = by_device(reference.assign_points)
move_centroids = by_device(reference.move_centroids)

__all__ = ["Centroids", "assign_points", "cluster_sizes", "move_centroids", "sort_members"]
