"""K-means of keys, by cosine as ClusterKV (section III-B), by L2 or by inner product."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gpu_worker.trainers import lloyd
from kv_store.client import KMeansParams

# As FAISS.
POINTS_PER_CENTROID = 256


def train_kmeans(keys: Tensor, params: KMeansParams, iterations: int, seed: int) -> Mapping[str, Tensor]:
    """See `train_index`. With no more tokens than clusters each token is its own, and the last fills the rest."""
    num_tokens, num_clusters = keys.shape[1], params.num_clusters
    if num_tokens <= num_clusters:
        own = torch.arange(num_clusters, device=keys.device).clamp(max=num_tokens - 1)
        labels = torch.arange(num_tokens, device=keys.device, dtype=torch.int32)
        return {"centroids": keys[:, own].float(), "labels": labels.expand(keys.shape[0], -1)}
    is_cosine = params.metric == "cosine"
    points = normalize(keys.float(), dim=-1) if is_cosine else keys.float()
    centroids = lloyd.fit(
        points,
        num_clusters,
        iterations,
        seed,
        metric=params.metric,
        max_points=POINTS_PER_CENTROID * num_clusters,
    )
    labels = lloyd.assign(points, centroids, params.metric)
    if is_cosine:
        # The paper's centroid is the mean of raw keys, whose direction differs from the mean of unit keys.
        centroids, sizes = lloyd.cluster_means(keys, labels, centroids)
        # What has no member is no mean, and must not get one now.
        labels = lloyd.assign(points, normalize(centroids, dim=-1), params.metric, sizes)
    return {"centroids": centroids, "labels": labels.int()}
