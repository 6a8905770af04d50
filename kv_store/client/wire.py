"""Records to messages and back; messages stay within this package's edge and the servicer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from carrel.process.histogram import Distribution
from carrel.process.version import Edition, edition_of
from kv_store.client.ends import SequenceEnd
from kv_store.client.errors import InvalidStoreRequest, refusing_odd_fields
from kv_store.client.indexes import ArrayRef, BitParams, IndexParams, KMeansParams, PQParams
from kv_store.client.layout import LAYOUT_VERSION, Layout
from kv_store.client.row_format import ELEMENT_BYTES, RowFormat
from kv_store.client.rows import RowsWanted
from kv_store.client.stats import CallStats, DiskStats, SequenceStats, SessionInfo, StoreStats, StoreTimes
from kv_store.v1 import kv_store_pb2 as pb

_ELEMENTS = {pb.RowType.Value(f"ROW_TYPE_{element.upper()}"): element for element in ELEMENT_BYTES}
_METRICS = {"l2": pb.METRIC_L2, "cosine": pb.METRIC_COSINE, "ip": pb.METRIC_INNER_PRODUCT}
_METRIC_NAMES = {value: name for name, value in _METRICS.items()}
KINDS = {"pq": pb.INDEX_KIND_PQ, "kmeans": pb.INDEX_KIND_KMEANS, "bits": pb.INDEX_KIND_BITS}
KIND_NAMES = {value: name for name, value in KINDS.items()}


def layout_to_message(layout: Layout) -> pb.Layout:
    """Raises InvalidStoreRequest for rows with scales, which the message has no field for."""
    row_format = layout.row_format
    if row_format.scale_bytes:
        raise InvalidStoreRequest(
            f"rows have {row_format.scale_bytes} bytes of scales, and the store takes rows without"
        )
    return pb.Layout(
        version=LAYOUT_VERSION,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=row_format.head_dim,
        row_type=f"ROW_TYPE_{row_format.element.upper()}",
    )


def layout_from_message(message: pb.Layout) -> Layout:
    """Raises InvalidStoreRequest for another layout version or a field out of range."""
    if message.version != LAYOUT_VERSION:
        raise InvalidStoreRequest(
            f"layout version {message.version} is not {LAYOUT_VERSION}: update both sides"
        )
    element = _ELEMENTS.get(message.row_type, f"number {message.row_type}")
    return Layout(message.num_layers, message.num_kv_heads, RowFormat(message.head_dim, element))


def own_edition() -> Edition:
    """Return the edition of store and store client."""
    return edition_of(pb.DESCRIPTOR.serialized_pb)


def edition_to_message(edition: Edition) -> pb.Edition:
    return pb.Edition(version=edition.version, messages=edition.messages)


def edition_from_message(message: pb.Edition) -> Edition:
    return Edition(message.version, message.messages)


def params_from_message(request: pb.BuildIndexRequest) -> IndexParams:
    """Raises InvalidStoreRequest when the request names no kind of index or no metric."""
    match request.WhichOneof("params"):
        case "pq":
            pq = request.pq
            metric = _metric_from_message(pq.metric or pb.METRIC_L2)
            return PQParams(pq.num_subvectors, pq.num_bits, pq.max_iterations, metric, pq.codebooks_only)
        case "kmeans":
            kmeans = request.kmeans
            metric = _metric_from_message(kmeans.metric)
            return KMeansParams(kmeans.num_clusters, metric, kmeans.max_iterations)
        case "bits":
            return BitParams(request.bits.num_sinks)
        case _:
            raise InvalidStoreRequest("the request names no kind of index: set pq, kmeans or bits")


def _metric_to_message(metric: str) -> pb.Metric:
    if metric not in _METRICS:
        raise InvalidStoreRequest(f"metric {metric!r} is none of {', '.join(_METRICS)}")
    return _METRICS[metric]


def _metric_from_message(metric: pb.Metric) -> str:
    if metric not in _METRIC_NAMES:
        raise InvalidStoreRequest(f"metric {metric} is none of {', '.join(_METRICS)}")
    return _METRIC_NAMES[metric]


def array_to_message(ref: ArrayRef) -> pb.ArrayRef:
    """The message has the record's fields, by the same names."""
    return pb.ArrayRef(**dataclasses.asdict(ref))


def array_from_message(message: pb.ArrayRef) -> ArrayRef:
    return ArrayRef(**{**_fields(ArrayRef, message), "shape": tuple(message.shape)})


def end_to_message(end: SequenceEnd) -> pb.SequenceEnd:
    """The message has the record's fields, by the same names."""
    return pb.SequenceEnd(**_fields(SequenceEnd, end))


def end_from_message(message: pb.SequenceEnd) -> SequenceEnd:
    return SequenceEnd(**{**_fields(SequenceEnd, message), "prefix_hashes": tuple(message.prefix_hashes)})


def session_to_message(session: SessionInfo) -> pb.Session:
    """The message has the record's fields, by the same names."""
    return pb.Session(**dataclasses.asdict(session))


def session_from_message(message: pb.Session) -> SessionInfo:
    return SessionInfo(**_fields(SessionInfo, message))


def stats_to_message(stats: StoreStats) -> pb.StatsResponse:
    """The message has the record's fields, by the same names."""
    return pb.StatsResponse(**dataclasses.asdict(stats))


def stats_from_message(message: pb.StatsResponse) -> StoreStats:
    sequences = tuple(SequenceStats(**_fields(SequenceStats, each)) for each in message.sequences)
    calls = tuple(
        CallStats(each.method, each.seconds, tuple(each.counts), dict(each.codes)) for each in message.calls
    )
    disk = DiskStats(**_fields(DiskStats, message.disk))
    times = {name: _distribution(each) for name, each in _fields(StoreTimes, message.times).items()}
    own = {
        "disk": disk,
        "sequences": sequences,
        "calls": calls,
        "call_bounds": tuple(message.call_bounds),
        "times": StoreTimes(**times),
    }
    return StoreStats(**{**_fields(StoreStats, message), **own})


def _distribution(message: pb.Histogram) -> Distribution:
    return Distribution(tuple(message.bounds), tuple(message.counts), message.sum)


def _fields(kind: type, source: Message | SequenceEnd) -> dict[str, Any]:
    return {field.name: getattr(source, field.name) for field in dataclasses.fields(kind)}


def build_index(params: IndexParams, **fields: object) -> pb.BuildIndexRequest:
    """The parameters' messages have their fields, by the same names. Raises InvalidStoreRequest for a value that no
    message can carry."""
    values: Any = dataclasses.asdict(params)
    if "metric" in values:
        values["metric"] = _metric_to_message(values["metric"])
    with refusing_odd_fields():
        request = pb.BuildIndexRequest(**fields)  # type: ignore[arg-type]
        match params:
            case PQParams():
                request.pq.CopyFrom(pb.PQParams(**values))
            case KMeansParams():
                request.kmeans.CopyFrom(pb.KMeansParams(**values))
            case BitParams():
                request.bits.CopyFrom(pb.BitParams(**values))
    return request


def gather(epoch: int, worker_id: str, layer: int, wanted: Sequence[RowsWanted]) -> pb.GatherRequest:
    """Raises InvalidStoreRequest for a value that no message can carry."""
    with refusing_odd_fields():
        items = [
            pb.GatherItem(
                sequence_id=item.sequence_id,
                layer=layer,
                kv_head=item.kv_head,
                positions=item.positions.tolist(),
            )
            for item in wanted
        ]
        return pb.GatherRequest(epoch=epoch, worker_id=worker_id, items=items)
