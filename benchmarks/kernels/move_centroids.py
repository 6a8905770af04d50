"""Means of clusters at ClusterKV's size; points and their order once in, centroids out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, contexts, relative_error
from benchmarks.kernels.centroid_rank import TOKENS_PER_CLUSTER
from gpu_worker.kernels.kmeans.reference import sort_members


def cases(setting: Setting) -> Iterator[KernelCase]:
    move, reference = setting.both("kernels.kmeans", "move_centroids")
    shape = setting.shape
    num_heads = shape.num_kv_heads
    for context in contexts(setting):
        num_clusters = max(2, context // TOKENS_PER_CLUSTER)

        def make(context: int = context, num_clusters: int = num_clusters) -> Operands:
            points = setting.normal(num_heads, context, shape.head_dim)
            labels = torch.randint(
                num_clusters, (num_heads, context), dtype=torch.int32, device=setting.device
            )
            # by directions, as ClusterKV
            wanted = (points, *sort_members(labels, num_clusters), True)

            def error() -> float:
                found, right = move(*wanted), reference(*wanted)
                return max(
                    relative_error(found.means, right.means), relative_error(found.targets, right.targets)
                )

            return Operands(lambda: move(*wanted), lambda: reference(*wanted), error)

        read = context * (shape.head_dim * setting.dtype.itemsize + 8) + 8 * num_clusters
        written = num_clusters * (shape.head_dim * (4 + setting.dtype.itemsize) + 4)
        label = f"{num_heads} x {context} in {num_clusters}"
        yield KernelCase("move_centroids", label, num_heads * (read + written), make, "the same in PyTorch")
