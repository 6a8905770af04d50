"""Indexes over keys: with which parameters they are trained, and what comes back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kv_store.client.layout import Layout

PQ_METRICS = ("l2", "ip")
KMEANS_METRICS = ("cosine", "l2", "ip")
# Of the arrays of an index, within its segment.
ALIGNMENT = 256
MAX_SINKS = 1024


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Name, dtype and shape of one array of an index; the first axis is the KV head."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def aligned_bytes(self) -> int:
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


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

    def specs(self, layout: Layout, num_tokens: int) -> tuple[ArraySpec, ...]:
        """Return the arrays of one layer's index over so many tokens."""
        heads, parts, is_ip = layout.num_kv_heads, self.num_subvectors, self.metric == "ip"
        width = layout.row_format.head_dim // parts + is_ip
        specs = [ArraySpec("codebooks", "float32", (heads, parts, 2**self.num_bits, width))]
        if not self.codebooks_only:
            specs.append(ArraySpec("codes", "uint8", (heads, num_tokens, parts)))
        if is_ip:
            specs.append(ArraySpec("max_square_norms", "float32", (heads, parts)))
        return tuple(specs)


@dataclass(frozen=True, slots=True)
class KMeansParams:
    """K-means of keys by "cosine", "l2" or "ip", the inner product (ClusterKV III-B); `max_iterations` 0: the store's
    bound. A centroid is the mean of its keys by each of them."""

    num_clusters: int
    metric: str = "cosine"
    max_iterations: int = 0

    def specs(self, layout: Layout, num_tokens: int) -> tuple[ArraySpec, ...]:
        """Return the arrays of one layer's index over so many tokens."""
        heads, width = layout.num_kv_heads, layout.row_format.head_dim
        return (
            ArraySpec("centroids", "float32", (heads, self.num_clusters, width)),
            ArraySpec("labels", "int32", (heads, num_tokens)),
        )


@dataclass(frozen=True, slots=True)
class BitParams:
    """Keys less their mean, rotated and rounded to two bits a coordinate (the worker's policy `bitkeys`). Its first
    `num_sinks` tokens are always attended: they count in the weights of the others, and are no candidates."""

    num_sinks: int = 0

    # None are made.
    max_iterations: ClassVar[int] = 0

    def specs(self, layout: Layout, num_tokens: int) -> tuple[ArraySpec, ...]:
        """Return the arrays of one layer's index over so many tokens."""
        heads, width = layout.num_kv_heads, layout.row_format.head_dim
        return (
            ArraySpec("anchors", "float32", (heads, 1 + self.num_sinks, width)),
            ArraySpec("codes", "uint8", (heads, num_tokens - self.num_sinks, -(-width // 4) + 2)),
        )


IndexParams = PQParams | KMeansParams | BitParams


def index_bytes(params: IndexParams, layout: Layout, num_tokens: int) -> int:
    """Return the bytes that one layer's index over so many tokens takes in the arena."""
    return sum(spec.aligned_bytes for spec in params.specs(layout, num_tokens))


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
