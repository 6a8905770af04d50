"""The interface of every kind of index: the shapes of its arrays, a fit for one head, and selection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest
from kv_store.client.indexes import ArraySpec, IndexParams
from kv_store.client.layout import Layout
from kv_store.index.keys import ArenaKeys, Keys

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class FitOptions:
    """`max_iterations` is resolved (at least 1); `max_points_per_centroid` 0 fits on every row."""

    max_iterations: int
    seed: int
    max_points_per_centroid: int


@dataclass(frozen=True, slots=True)
class Fit:
    """One head's arrays in the order of `specs`, the iterations made, and the seconds that these took of the fit."""

    arrays: tuple[Array, ...]
    iterations: int = 0
    iterating_seconds: float = 0.0


class Index(ABC):
    """One kind of index with its parameters. Instances hold no state and are safe to share."""

    kind: ClassVar[str]
    # The first of the fitted tokens, that are no candidates: the second array has no rows of them.
    num_leading = 0
    # The second array has a row for each token.
    is_searchable = True

    def __init__(self, params: IndexParams, num_centroids: int) -> None:
        """num_centroids: of each K-means problem of a head."""
        self._params = params
        self.num_centroids = num_centroids
        # Indexes of one name take alike for as many tokens, points and iterations.
        self.costs_like: str = self.kind

    def specs(self, layout: Layout, num_tokens: int) -> tuple[ArraySpec, ...]:
        """Arrays of an index over `num_tokens` tokens. Raises InvalidStoreRequest when the parameters do not fit."""
        return self._params.specs(layout, num_tokens)

    def num_points(self, num_rows: int, max_points_per_centroid: int) -> int:
        """How many of so many rows an iteration goes over."""
        return min(num_rows, max_points_per_centroid * self.num_centroids or num_rows)

    @abstractmethod
    def fit_head(self, keys: ArenaKeys, options: FitOptions) -> Fit:
        """Fit one head's keys. The same keys, options and seed give the same arrays.

        Raises InvalidStoreRequest for a key that is not finite.
        """

    def extend_head(self, keys: ArenaKeys, arrays: tuple[Array, ...]) -> Array:
        """Code tokens that follow the fitted ones by one head's fitted arrays: a row of the second array for each
        key. Raises InvalidStoreRequest where such tokens need an index of their own."""
        raise InvalidStoreRequest(
            f"{keys.num_rows} candidates are in no {self.kind} index: build one over them too"
        )

    @abstractmethod
    def select_head(
        self, queries: Keys, segments: Sequence[tuple[Array, ...]], k: int, scale: float
    ) -> npt.NDArray[np.int64]:
        """The `k` best rows for one head's queries float32 [G, d]: row numbers, ascending, int64 [min(k, rows)].

        segments: one head's arrays of indexes that adjoin each other; rows count through all of them. scale: of the
        model's attention. Raises InvalidStoreRequest where indexes of this kind cannot be searched together.
        """


def top_k_positions(scores: Keys, k: int) -> npt.NDArray[np.int64]:
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
