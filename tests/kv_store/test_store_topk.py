"""Selection against brute force."""

import numpy as np
import pytest

from kv_store.index.base import top_k_positions
from kv_store.index.kmeans import cluster_rows
from kv_store.index.pq import pq_scores


def brute_top_k(scores: np.ndarray, k: int) -> list[int]:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], -i))
    return sorted(order[:k])


@pytest.mark.parametrize("k", [0, 1, 7, 50, 200, 500])
def test_top_k_with_many_ties(k: int) -> None:
    scores = np.random.default_rng(k).integers(0, 6, 200).astype(np.float32)
    assert top_k_positions(scores, k).tolist() == brute_top_k(scores, k)


@pytest.mark.parametrize("k", [1, 5, 9, 10])
def test_scores_that_are_no_numbers_come_last(k: int) -> None:
    scores = np.arange(10, dtype=np.float32)
    scores[[2, 7, 8]] = np.nan
    found = top_k_positions(scores, k)
    assert found.size == k
    assert set([9, 6, 5, 4, 3, 1, 0][:k]) <= set(found.tolist())


@pytest.mark.parametrize(("parts", "ksub"), [(2, 16), (2, 256), (1, 16), (4, 4)])
def test_pq_scores_are_softmax_sums_over_the_group(parts: int, ksub: int) -> None:
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((4, 8)).astype(np.float32)
    codebooks = rng.standard_normal((parts, ksub, 8 // parts)).astype(np.float32)
    codes = rng.integers(0, ksub, (60, parts)).astype(np.uint8)
    keys = np.concatenate([codebooks[p][codes[:, p]] for p in range(parts)], axis=1).astype(np.float64)
    logits = queries.astype(np.float64) @ keys.T / np.sqrt(8)
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert np.allclose(pq_scores(queries, codebooks, codes, 8**-0.5), weights.sum(axis=0), rtol=1e-5)


def test_pq_scores_stand_large_logits() -> None:
    queries = np.full((1, 4), 1e4, np.float32)
    codebooks = np.array([[[1, 1, 1, 1], [-1, -1, -1, -1]]], np.float32)
    assert pq_scores(queries, codebooks, np.array([[0], [1]], np.uint8), 0.5).tolist() == [1.0, 0.0]


def brute_clusters(queries: np.ndarray, centroids: np.ndarray, labels: np.ndarray, k: int) -> list[int]:
    scores = centroids @ queries.sum(axis=0)
    taken: list[int] = []
    for cluster in sorted(range(len(centroids)), key=lambda c: (-scores[c], c)):
        taken += [i for i in range(len(labels)) if labels[i] == cluster]
    return sorted(taken[:k])


@pytest.mark.parametrize("k", [0, 1, 10, 33, 100, 150])
def test_whole_clusters_are_taken_and_the_last_is_cut(k: int) -> None:
    rng = np.random.default_rng(k)
    queries = rng.integers(-2, 3, (3, 8)).astype(np.float32)
    centroids = rng.integers(-2, 3, (12, 8)).astype(np.float32)
    centroids[5] = centroids[4]
    labels = rng.integers(0, 11, 100).astype(np.int32)  # cluster 11 is empty
    assert cluster_rows(queries, centroids, labels, k).tolist() == brute_clusters(
        queries, centroids, labels, k
    )
