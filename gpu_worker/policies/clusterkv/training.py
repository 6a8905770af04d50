"""K-means of keys, by cosine as ClusterKV (section III-B), by L2 or by inner product."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_worker.kernels.kmeans import lloyd
from kv_store.client import KMeansParams


def kmeans_bytes(keys: Tensor, params: KMeansParams) -> int:
    """See `RecallPolicy.training_bytes`. Keys are read where they lie, by any metric."""
    return lloyd.fit_bytes(keys, params.num_clusters)


def train_kmeans(keys: Tensor, params: KMeansParams, seed: int) -> Mapping[str, Tensor]:
    """See `RecallPolicy.train`: centroids float32 [H, C, d] and labels int32 [H, T].

    With no more tokens than clusters each token is its own, and the last fills the rest."""
    num_tokens, num_clusters = keys.shape[1], params.num_clusters
    if num_tokens <= num_clusters:
        own = torch.arange(num_clusters, device=keys.device).clamp(max=num_tokens - 1)
        labels = torch.arange(num_tokens, device=keys.device, dtype=torch.int32)
        return {"centroids": keys[:, own].float(), "labels": labels.expand(keys.shape[0], -1)}
    iterations = params.max_iterations or lloyd.DEFAULT_ITERATIONS
    centroids, sizes = lloyd.fit(keys, num_clusters, iterations, seed, params.metric)
    # By cosine, what has no member is no mean, and must not get one now.
    labels = lloyd.assign(keys, centroids, params.metric, sizes if params.metric == "cosine" else None)
    return {"centroids": centroids.means, "labels": labels}
