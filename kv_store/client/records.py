"""The records that cross the client's seam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PQ_METRICS = ("l2", "ip")
KMEANS_METRICS = ("cosine", "l2", "ip")


@dataclass(frozen=True, slots=True)
class PQParams:
    """Product quantisation of keys: 2**num_bits centroids for each of num_subvectors parts (PQCache 3.1).

    `max_iterations` 0 leaves the number to the store's adaptive bound. `metric`, one of `PQ_METRICS`: "ip" gives each
    part of a key x one more coordinate, sqrt(phi - |x|^2) with phi the largest |x|^2 of the fitted; by L2 the parts
    then are as near to a query as their inner product with it is large. `codebooks_only`: whoever asks codes the keys
    itself, and the store cannot search such an index.
    """

    num_subvectors: int = 2
    num_bits: int = 6
    max_iterations: int = 0
    metric: str = "l2"
    codebooks_only: bool = False


@dataclass(frozen=True, slots=True)
class KMeansParams:
    """K-means of keys by "cosine", "l2" or "ip", the inner product (ClusterKV III-B); `max_iterations` 0: the store's
    bound. A centroid is the mean of its keys by each of them."""

    num_clusters: int
    metric: str = "cosine"
    max_iterations: int = 0


IndexParams = PQParams | KMeansParams


def check_metric(metric: str, known: Sequence[str]) -> None:
    """Raises ValueError for a metric that is none of the known."""
    if metric not in known:
        raise ValueError(f"metric {metric!r} is none of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """Where one array of an index lies in the arena; `dtype` is numpy's name, `offset` counts from byte 0."""

    name: str
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IndexSegment:
    """A trained index. `arrays` are read-only and valid until the sequence is released; there are none where the store
    itself selects.

    pq: codebooks float32 [H, m, 2**b, d/m], codes uint8 [H, N, m]; by "ip" a centroid has its added coordinate last,
    d/m + 1 in all, and max_square_norms float32 [H, m] is phi. kmeans: centroids float32 [H, C, d], labels int32
    [H, N]. Row i of codes and labels is token `token_begin + i`.
    """

    kind: str
    arrays: Mapping[str, npt.NDArray[Any]]
    training_seconds: float
    iterations: int


@dataclass(frozen=True, slots=True)
class RowsWanted:
    """Rows of one KV head of one sequence, in this order; `positions` int64 [num_rows]."""

    sequence_id: str
    kv_head: int
    positions: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TopKWanted:
    """What one sequence selects from: the `k` best of the candidates [token_begin, token_end).

    queries: float32 [num_kv_heads, group_size, head_dim]. resident: bool [num_kv_heads, candidates], true where the row
    is not wanted; None: no rows are.
    """

    sequence_id: str
    token_begin: int
    token_end: int
    k: int
    queries: npt.NDArray[np.float32]
    resident: npt.NDArray[np.bool_] | None = None


def count_rows(wanted: Sequence[RowsWanted]) -> int:
    """Rows of all items."""
    return sum(item.positions.size for item in wanted)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Sealed slabs that a sequence now shares: `slab_table` int32 [num_layers, slabs_per_layer]."""

    num_tokens: int
    slab_table: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """One live sequence; `num_tokens` are sealed in every layer."""

    sequence_id: str
    worker_id: str
    num_tokens: int
    held_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The store's gauges of now and its counters since the start."""

    epoch: int
    arena_bytes: int
    held_bytes: int
    reserved_bytes: int
    leased_bytes: int
    index_bytes: int
    num_sequences: int
    num_indexes: int
    num_workers: int
    num_sessions: int
    training_seconds: float
    gathered_rows: int
    sequences: tuple[SequenceStats, ...]
