"""ClusterKV's order of tokens by their cluster; two labels a token in, one rank out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, mismatch

# ClusterKV's own
TOKENS_PER_CLUSTER = 80


def cases(setting: Setting) -> Iterator[KernelCase]:
    rank, reference = setting.both("policies.clusterkv.centroid_rank", "centroid_rank")
    shape, device = setting.shape, setting.device
    for workload in setting.workloads:
        num_clusters = max(2, workload.context // TOKENS_PER_CLUSTER)

        def make(
            batch: int = workload.batch, context: int = workload.context, num_clusters: int = num_clusters
        ) -> Operands:
            size = (batch, shape.num_kv_heads)
            query = setting.normal(batch, shape.num_heads, shape.head_dim)
            centroids = torch.randn(*size, num_clusters, shape.head_dim, device=device)
            # cluster c holds every position that leaves the rest c
            places = torch.arange(context, dtype=torch.int32, device=device).expand(*size, context)
            labels, within = (
                (places % num_clusters).contiguous(),
                places.div(num_clusters, rounding_mode="floor"),
            )
            sizes = torch.zeros(*size, num_clusters, dtype=torch.int32, device=device)
            sizes.scatter_add_(-1, labels.long(), torch.ones_like(labels))
            begin = torch.zeros(batch, dtype=torch.int64, device=device)
            seats = torch.arange(batch, device=device)
            end = torch.full_like(begin, context)
            wanted = (query, centroids, sizes, labels, within, seats, begin, end, context)
            return Operands(lambda: rank(*wanted), error=lambda: mismatch(rank(*wanted), reference(*wanted)))

        rows = workload.batch * shape.num_kv_heads
        num_bytes = rows * (12 * workload.context + num_clusters * 4 * (shape.head_dim + 1))
        yield KernelCase("centroid_rank", f"{rows} x {workload.context}", num_bytes, make)
