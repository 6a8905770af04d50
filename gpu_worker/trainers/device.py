"""Trains an index on the model's device: the arrays that the store's trainers make of the same keys on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gpu_worker.trainers.kmeans import kmeans_bytes, train_kmeans
from gpu_worker.trainers.pq import pq_bytes, train_pq
from kv_store.client import KMEANS_METRICS, PQ_METRICS, KMeansParams, PQParams, check_metric

# Lloyd's iterations where the parameters leave them open: no CPU time has to be hidden here.
DEFAULT_ITERATIONS = 10


def train_index(keys: Tensor, params: PQParams | KMeansParams, seed: int) -> Mapping[str, Tensor]:
    """Train an index over keys [H_kv, T, d] of any float type; does not synchronise with the host.

    Returns, on the keys' device: for PQ, codebooks float32 [H_kv, m, 2^b, d/m] and codes uint8 [H_kv, T, m], by inner
    product a coordinate more in every centroid and max_square_norms float32 [H_kv, m]; for K-means, centroids float32
    [H_kv, C, d] and labels int32 [H_kv, T]. The same keys, parameters and seed give the same arrays. Raises ValueError
    for an unknown metric.
    """
    iterations = params.max_iterations or DEFAULT_ITERATIONS
    if isinstance(params, PQParams):
        check_metric(params.metric, PQ_METRICS)
        return train_pq(keys, params, iterations, seed)
    check_metric(params.metric, KMEANS_METRICS)
    return train_kmeans(keys, params, iterations, seed)


def training_bytes(keys: Tensor, params: PQParams | KMeansParams) -> int:
    """Most bytes that `train_index` has on a GPU at one time, the keys left out and the arrays included.

    keys: as of `train_index`, on the meta device: only their shape and type count.
    """
    return pq_bytes(keys, params) if isinstance(params, PQParams) else kmeans_bytes(keys, params)
