"""Store-side selection: rows of one KV head for the queries of its group."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


def top_k_positions(scores: F32, k: int) -> I64:
    """The `k` best of `scores` [N], ascending by position; of equal scores the later position wins."""
    count = min(k, scores.size)
    if count == scores.size:
        return np.arange(scores.size, dtype=np.int64)
    threshold = np.partition(scores, scores.size - count)[scores.size - count]
    above = np.flatnonzero(scores > threshold)
    equal = np.flatnonzero(scores == threshold)
    return np.sort(np.concatenate([above, equal[equal.size - (count - above.size) :]]))


def pq_scores(queries: F32, codebooks: F32, codes: npt.NDArray[np.uint8]) -> F32:
    """PQCache 3.2: inner products by table, softmax over the rows per query, summed over the group.

    queries [G, d], codebooks [m, 2**b, d/m], codes [N, m]; returns float32 [N].
    """
    parts, _, width = codebooks.shape
    tables = np.einsum("gpw,pjw->gpj", queries.reshape(-1, parts, width), codebooks)
    logits = np.zeros((queries.shape[0], codes.shape[0]), np.float32)
    for part in range(parts):
        logits += tables[:, part, codes[:, part]]
    logits /= np.float32(np.sqrt(queries.shape[1]))
    logits -= logits.max(axis=1, keepdims=True)
    weights = np.exp(logits)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights.sum(axis=0)


def cluster_rows(queries: F32, centroids: F32, labels: npt.NDArray[np.int32], k: int) -> I64:
    """ClusterKV III-C: whole clusters by summed inner product until `k` rows, the last one cut at its end.

    queries [G, d], centroids [C, d], labels [N]; returns int64 [min(k, N)], ascending. Empty clusters are passed
    over; of equal scores the later cluster goes first.
    """
    num_clusters = centroids.shape[0]
    scores = centroids @ queries.sum(axis=0)
    sizes = np.bincount(labels, minlength=num_clusters)
    order = num_clusters - 1 - np.argsort(-scores[::-1], kind="stable")
    order = order[sizes[order] > 0]
    # by_cluster lists rows cluster by cluster, ascending within each: the stable sort keeps positions in order
    by_cluster = np.argsort(labels, kind="stable")
    starts = np.concatenate([[0], np.cumsum(sizes)])
    taken: list[I64] = []
    room = k
    for cluster in order:
        if room <= 0:
            break
        members = by_cluster[starts[cluster] : starts[cluster + 1]][:room]
        taken.append(members)
        room -= members.size
    return np.sort(np.concatenate(taken)) if taken else np.empty(0, np.int64)
