"""Order tokens by the rank of their cluster, so that a plain top-k takes whole clusters."""

from gpu_worker.kernels.centroid_rank.reference import centroid_rank

__all__ = ["centroid_rank"]
