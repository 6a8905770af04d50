"""Order tokens by the rank of their cluster, so that a plain top-k takes whole clusters."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.policies.clusterkv.centroid_rank import reference

centroid_rank = by_device(reference.centroid_rank)
