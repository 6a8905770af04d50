"""Store-side selection: rows of one KV head for the queries of its group."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

# Of more centroids the pairs are too many for a table.
_MAX_PAIR_KSUB = 128


def top_k_positions(scores: F32, k: int) -> I64:
    """The `k` best of `scores` [N], ascending by position; of equal scores the later wins, NaN is the least."""
    if np.isnan(scores).any():
        scores = np.fmax(scores, np.float32(-np.inf))
    count = min(k, scores.size)
    if count == scores.size:
        return np.arange(scores.size, dtype=np.int64)
    if count == 0:
        # Where sinks and window are all of a budget.
        return np.empty(0, np.int64)
    threshold = np.partition(scores, scores.size - count)[scores.size - count]
    above = np.flatnonzero(scores > threshold)
    equal = np.flatnonzero(scores == threshold)
    return np.sort(np.concatenate([above, equal[equal.size - (count - above.size) :]]))


@np.errstate(over="ignore", invalid="ignore")
def pq_scores(queries: F32, codebooks: F32, codes: npt.NDArray[np.uint8], scale: float) -> F32:
    """PQCache 3.2: inner products by table, softmax over the rows per query, summed over the group.

    queries [G, d], codebooks [m, 2**b, d/m], codes [N, m]; scale: of the softmax. Returns float32 [N], NaN where inner
    products overflow.
    """
    parts, ksub, width = codebooks.shape
    tables = np.einsum("gpw,pjw->gpj", queries.reshape(-1, parts, width) * np.float32(scale), codebooks)
    if parts == 2 and ksub <= _MAX_PAIR_KSUB:
        # Two codes determine a weight: one exponential for each pair that occurs, and none for a row.
        pairs = codes[:, 0].astype(np.int64) * ksub + codes[:, 1]
        counts = np.bincount(pairs, minlength=ksub * ksub)
        logits = (tables[:, 0, :, None] + tables[:, 1, None, :]).reshape(len(queries), -1)
        logits[:, counts == 0] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return (weights / (weights @ counts.astype(np.float32))[:, None]).sum(axis=0)[pairs]
    logits = np.zeros((len(queries), len(codes)), np.float32)
    for part in range(parts):
        logits += tables[:, part, codes[:, part]]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)


def cluster_rows(queries: F32, centroids: F32, labels: npt.NDArray[np.integer], k: int) -> I64:
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
