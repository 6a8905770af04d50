"""K-means of keys, by cosine as ClusterKV III-B, by L2 or by inner product."""

from __future__ import annotations

import time
from collections.abc import Sequence

import faiss
import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest
from kv_store.client.indexes import KMEANS_METRICS, KMeansParams
from kv_store.index.base import Array, Fit, FitOptions, Index
from kv_store.index.keys import ArenaKeys, Keys, first_equals

_MAX_CLUSTERS = 1 << 20
_SEED_MASK = 0x7FFF_FFFF
_NO_LIMIT = 1 << 30
_EPSILON = np.float32(1e-6)


class KMeansIndex(Index):
    """Arrays: centroids float32 [H, C, d] (means of raw keys), labels int32 [H, N].

    With no more rows than clusters each row is its own centroid; the clusters beyond are copies of the last and
    have no member.
    """

    kind = "kmeans"

    def __init__(self, params: KMeansParams) -> None:
        if not 1 <= params.num_clusters <= _MAX_CLUSTERS:
            raise InvalidStoreRequest(
                f"num_clusters is {params.num_clusters}, it must be from 1 to {_MAX_CLUSTERS}"
            )
        if params.metric not in KMEANS_METRICS:
            raise InvalidStoreRequest(f"metric {params.metric!r} is none of {', '.join(KMEANS_METRICS)}")
        super().__init__(params, params.num_clusters)
        self._is_cosine = params.metric == "cosine"
        self._is_l2 = params.metric == "l2"

    def fit_head(self, source: ArenaKeys, options: FitOptions) -> Fit:
        keys, num_rows = source.all(), source.num_rows
        if num_rows <= self.num_centroids:
            filled = np.minimum(np.arange(self.num_centroids), num_rows - 1)
            labels = np.arange(num_rows, dtype=np.int32)
            return Fit((np.ascontiguousarray(keys[filled]), labels))
        points = _unit(keys) if self._is_cosine else keys
        kmeans = faiss.Kmeans(
            keys.shape[1],
            self.num_centroids,
            niter=options.max_iterations,
            seed=options.seed & _SEED_MASK,
            spherical=self._is_cosine,
            min_points_per_centroid=1,
            max_points_per_centroid=options.max_points_per_centroid or _NO_LIMIT,
        )
        if not self._is_l2:
            # FAISS goes by it only where centroids are to be unit.
            kmeans.index = faiss.IndexFlatIP(keys.shape[1])
        begun = time.perf_counter()
        kmeans.train(points)
        seconds = time.perf_counter() - begun
        centroids = np.ascontiguousarray(kmeans.centroids)
        labels = self._assign(points, centroids)
        if self._is_cosine:
            # The paper's centroid is the mean of raw keys, whose direction differs from the mean of unit keys.
            centroids, sizes = _means(keys, labels, centroids)
            members = np.flatnonzero(sizes)
            labels = members[self._assign(points, centroids[members])].astype(np.int32)
        return Fit((centroids, labels), options.max_iterations, seconds)

    def select_head(
        self, queries: Keys, segments: Sequence[tuple[Array, ...]], k: int, scale: float
    ) -> npt.NDArray[np.int64]:
        firsts = np.cumsum([0, *(len(centroids) for centroids, _ in segments)])
        centroids = np.concatenate([centroids for centroids, _ in segments])
        labels = np.concatenate(
            [labels + first for (_, labels), first in zip(segments, firsts, strict=False)]
        )
        return cluster_rows(queries, centroids, labels, k)

    def _assign(self, points: Keys, centroids: Keys) -> npt.NDArray[np.int32]:
        metric = faiss.METRIC_L2 if self._is_l2 else faiss.METRIC_INNER_PRODUCT
        targets = _unit(centroids) if self._is_cosine else centroids
        _, nearest = faiss.knn(points, targets, 1, metric=metric)
        # FAISS leaves it to the processor which of equal ones it names: the first one here.
        labels = first_equals(targets)[nearest[:, 0]].astype(np.int32)
        if not self._is_l2:
            # All products with zero are equal.
            labels[~points.any(axis=1)] = 0
        return labels


def _unit(rows: Keys) -> Keys:
    norms = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _EPSILON)
    return np.ascontiguousarray(rows / norms, dtype=np.float32)


def _means(keys: Keys, labels: npt.NDArray[np.int32], earlier: Keys) -> tuple[Keys, npt.NDArray[np.int64]]:
    """Mean of each cluster's keys and its size; an empty cluster keeps its earlier centroid."""
    num_clusters = earlier.shape[0]
    sizes = np.bincount(labels, minlength=num_clusters)
    order = np.argsort(labels, kind="stable")
    used = np.flatnonzero(sizes)
    starts = np.concatenate([[0], np.cumsum(sizes[used])[:-1]])
    means = earlier.copy()
    means[used] = np.add.reduceat(keys[order], starts, axis=0) / sizes[used, None]
    return means, sizes


def cluster_rows(
    queries: Keys, centroids: Keys, labels: npt.NDArray[np.integer], k: int
) -> npt.NDArray[np.int64]:
    """ClusterKV III-C: whole clusters by summed inner product until `k` rows, the last one cut at its end.

    queries [G, d], centroids [C, d], labels [N]; returns int64 [min(k, N)], ascending. Empty clusters are passed
    over; of equal scores the smaller number goes first.
    """
    sizes = np.bincount(labels, minlength=centroids.shape[0])
    order = np.argsort(-(centroids @ queries.sum(axis=0)), kind="stable")
    order = order[sizes[order] > 0]
    reached = np.cumsum(sizes[order])
    is_taken = np.zeros(centroids.shape[0], bool)
    is_taken[order[reached <= k]] = True
    rows = np.flatnonzero(is_taken[labels])
    if rows.size < min(k, labels.size):
        last = np.flatnonzero(labels == order[np.count_nonzero(reached <= k)])
        rows = np.sort(np.concatenate([rows, last[: k - rows.size]]))
    return rows
