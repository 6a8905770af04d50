"""Indexes over keys: with which parameters they are trained, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from kv_store.client.layout import Layout

PQ_METRICS = ("l2", "ip")
KMEANS_METRICS = ("cosine", "l2", "ip")
# Of the arrays of an index, within its segment.
ALIGNMENT = 256
MAX_SINKS = 1024


@dataclass(frozen=True, slots=True)
class PQParams:
    """Product quantisation of keys: 2**num_bits centroids for each of num_subvectors parts (PQCache 3.1).

    `max_iterations` 0 leaves the number to the store's adaptive bound. `metric`, one of `PQ_METRICS`: "ip" gives each
    part of a key x one more coordinate, sqrt(phi - |x|^2) with phi the largest |x|^2 of the fitted; by L2 the parts
    then are as near to a query as their inner product with it is large. `codebooks_only`: the caller codes the keys
    itself, and the store cannot search such an index.
    """

    num_subvectors: int = 2
    num_bits: int = 6
    max_iterations: int = 0
    metric: str = "l2"
    codebooks_only: bool = False

    def num_bytes(self, layout: Layout, num_tokens: int) -> int:
        """Return the bytes that one layer's index over so many tokens takes in the arena."""
        width = layout.row_format.head_dim // self.num_subvectors + (self.metric == "ip")
        books = layout.num_kv_heads * self.num_subvectors * 2**self.num_bits * width * 4
        codes = 0 if self.codebooks_only else layout.num_kv_heads * num_tokens * self.num_subvectors
        norms = layout.num_kv_heads * self.num_subvectors * 4 if self.metric == "ip" else 0
        return _aligned(books) + _aligned(codes) + _aligned(norms)


@dataclass(frozen=True, slots=True)
class KMeansParams:
    """K-means of keys by "cosine", "l2" or "ip", the inner product (ClusterKV III-B); `max_iterations` 0: the store's
    bound. A centroid is the mean of its keys by each of them."""

    num_clusters: int
    metric: str = "cosine"
    max_iterations: int = 0

    def num_bytes(self, layout: Layout, num_tokens: int) -> int:
        """Return the bytes that one layer's index over so many tokens takes in the arena."""
        centroids = layout.num_kv_heads * self.num_clusters * layout.row_format.head_dim * 4
        return _aligned(centroids) + _aligned(layout.num_kv_heads * num_tokens * 4)


@dataclass(frozen=True, slots=True)
class BitParams:
    """Keys less their mean, rotated and rounded to two bits a coordinate (the worker's policy `bitkeys`). Its first
    `num_sinks` tokens are always attended: they count in the weights of the others, and are no candidates."""

    num_sinks: int = 0

    @property
    def max_iterations(self) -> int:
        """None are made."""
        return 0

    def num_bytes(self, layout: Layout, num_tokens: int) -> int:
        """Return the bytes that one layer's index over so many tokens takes in the arena."""
        heads, width = layout.num_kv_heads, layout.row_format.head_dim
        anchors = heads * (1 + self.num_sinks) * width * 4
        return _aligned(anchors) + _aligned(heads * (num_tokens - self.num_sinks) * (-(-width // 4) + 2))


IndexParams = PQParams | KMeansParams | BitParams


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def check_metric(metric: str, known: Sequence[str]) -> None:
    """Raises ValueError for a metric that is none of the known."""
    if metric not in known:
        raise ValueError(f"metric {metric!r} is none of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """Where one array of an index lies in the arena; `dtype` is numpy's name, `offset` counts from byte 0. checksum: of
    its bytes, once it is trained."""

    name: str
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class IndexSegment:
    """A trained index. `arrays` are read-only and valid until the sequence is released; there are none where the store
    itself selects.

    pq: codebooks float32 [H, m, 2**b, d/m], codes uint8 [H, N, m]; by "ip" a centroid has its added coordinate last,
    d/m + 1 in all, and max_square_norms float32 [H, m] is phi. kmeans: centroids float32 [H, C, d], labels int32
    [H, N]. Row i of codes and labels is token `token_begin + i`. Only a store that selects makes one of bits.
    """

    kind: str
    arrays: Mapping[str, npt.NDArray[Any]]
    training_seconds: float
    iterations: int
