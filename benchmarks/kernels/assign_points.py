"""Nearest centroids at ClusterKV's size; bound by arithmetic, it must at least read points and centroids once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kernels.base import KernelCase, Operands, Setting, contexts, mismatch
from benchmarks.kernels.centroid_rank import TOKENS_PER_CLUSTER
from gpu_worker.kernels.kmeans.reference import MAX_SCORES


def cases(setting: Setting) -> Iterator[KernelCase]:
    assign, reference = setting.both("kernels.kmeans", "assign_points")
    shape = setting.shape
    num_heads = shape.num_kv_heads
    for context in contexts(setting):
        num_clusters = max(2, context // TOKENS_PER_CLUSTER)

        def make(context: int = context, num_clusters: int = num_clusters) -> Operands:
            points = setting.normal(num_heads, context, shape.head_dim)
            targets = setting.normal(num_heads, num_clusters, shape.head_dim)

            def rival() -> Tensor:
                parts = points.split(max(1, MAX_SCORES // (num_heads * num_clusters)), dim=1)
                return torch.cat([(part @ targets.mT).argmax(dim=-1) for part in parts], dim=1)

            return Operands(
                lambda: assign(points, targets),
                rival,
                lambda: mismatch(assign(points, targets), reference(points, targets)),
            )

        a_vector = shape.head_dim * setting.dtype.itemsize
        num_bytes = num_heads * ((context + num_clusters) * a_vector + 4 * context)
        label = f"{num_heads} x {context} to {num_clusters}"
        yield KernelCase("assign_points", label, num_bytes, make, "torch product, argmax")
