"""Kinds of index by the parameters that ask for them."""

from __future__ import annotations

from kv_store.client.indexes import BitParams, IndexParams, KMeansParams, PQParams
from kv_store.index.base import FitOptions, Index
from kv_store.index.bits import BitIndex
from kv_store.index.bound import Effort, FitCost, IterationBound
from kv_store.index.keys import ArenaKeys, ArrayKeys
from kv_store.index.kmeans import KMeansIndex
from kv_store.index.pq import PQIndex

__all__ = [
    "ArenaKeys",
    "ArrayKeys",
    "Effort",
    "FitCost",
    "FitOptions",
    "Index",
    "IterationBound",
    "make_index",
]


def make_index(params: IndexParams) -> Index:
    """The index for these parameters. Raises InvalidStoreRequest for a value out of range."""
    match params:
        case PQParams():
            return PQIndex(params)
        case KMeansParams():
            return KMeansIndex(params)
        case BitParams():
            return BitIndex(params)
