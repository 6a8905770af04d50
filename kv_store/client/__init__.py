"""The worker's side of the KV store: numpy and gRPC only."""

from __future__ import annotations

from kv_store.client.client import StoreClient
from kv_store.client.errors import (
    CorruptRows,
    HandoffRefused,
    InvalidStoreRequest,
    NotInStore,
    PrefixLoading,
    StaleEpoch,
    StoreError,
    StoreFull,
    StoreSilent,
    StoreUnreachable,
    TokenRefused,
    VersionMismatch,
)
from kv_store.client.indexes import (
    KMEANS_METRICS,
    PQ_METRICS,
    BitParams,
    IndexParams,
    IndexSegment,
    KMeansParams,
    PQParams,
    check_metric,
)
from kv_store.client.layout import Layout
from kv_store.client.row_format import RowFormat
from kv_store.client.rpc import check_edition, open_channel
from kv_store.client.slab_tables import Begun, RowsWanted, TopKWanted
from kv_store.client.stats import CallStats, SequenceStats, SessionInfo, StoreStats

__all__ = [
    "KMEANS_METRICS",
    "PQ_METRICS",
    "Begun",
    "BitParams",
    "CallStats",
    "CorruptRows",
    "HandoffRefused",
    "IndexParams",
    "IndexSegment",
    "InvalidStoreRequest",
    "KMeansParams",
    "Layout",
    "NotInStore",
    "PQParams",
    "PrefixLoading",
    "RowFormat",
    "RowsWanted",
    "SequenceStats",
    "SessionInfo",
    "StaleEpoch",
    "StoreClient",
    "StoreError",
    "StoreFull",
    "StoreSilent",
    "StoreStats",
    "StoreUnreachable",
    "TokenRefused",
    "TopKWanted",
    "VersionMismatch",
    "check_edition",
    "check_metric",
    "open_channel",
]
