"""Records to messages and back; messages stay within this package's edge and the servicer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

from carrel.process.version import Edition, edition_of
from kv_store.client.errors import InvalidStoreRequest, refusing_odd_fields
from kv_store.client.indexes import BitParams, IndexParams, KMeansParams, PQParams
from kv_store.client.layout import LAYOUT_VERSION, Layout
from kv_store.client.row_format import ELEMENT_BYTES, RowFormat
from kv_store.client.slab_tables import RowsWanted
from kv_store.v1 import kv_store_pb2 as pb

Record = TypeVar("Record", bound="DataclassInstance")

_hints = cache(get_type_hints)
_ELEMENTS = {pb.RowType.Value(f"ROW_TYPE_{element.upper()}"): element for element in ELEMENT_BYTES}
_METRICS = {"l2": pb.METRIC_L2, "cosine": pb.METRIC_COSINE, "ip": pb.METRIC_INNER_PRODUCT}
_METRIC_NAMES = {value: name for name, value in _METRICS.items()}
_PARAMS: dict[str, type[IndexParams]] = {"pq": PQParams, "kmeans": KMeansParams, "bits": BitParams}
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


def params_from_message(request: pb.BuildIndexRequest) -> IndexParams:
    """Raises InvalidStoreRequest when the request names no kind of index or no metric."""
    name = request.WhichOneof("params")
    if name is None:
        raise InvalidStoreRequest("the request names no kind of index: set pq, kmeans or bits")
    kind, message = _PARAMS[name], getattr(request, name)
    values = {field.name: getattr(message, field.name) for field in fields(kind)}
    if "metric" in values:
        metric = values["metric"] or (pb.METRIC_L2 if name == "pq" else pb.METRIC_UNSPECIFIED)
        if metric not in _METRIC_NAMES:
            raise InvalidStoreRequest(f"metric {metric} is none of {', '.join(_METRICS)}")
        values["metric"] = _METRIC_NAMES[metric]
    return kind(**values)


def build_index(params: IndexParams, **request: Any) -> pb.BuildIndexRequest:
    """The parameters' messages have their fields, by the same names. Raises InvalidStoreRequest for a value that no
    message can carry."""
    values: Any = asdict(params)
    if "metric" in values:
        if values["metric"] not in _METRICS:
            raise InvalidStoreRequest(f"metric {values['metric']!r} is none of {', '.join(_METRICS)}")
        values["metric"] = _METRICS[values["metric"]]
    [name] = [name for name, kind in _PARAMS.items() if kind is type(params)]
    with refusing_odd_fields():
        return pb.BuildIndexRequest(**request, **{name: values})


def record_of(kind: type[Record], message: Message) -> Record:
    """Make a record of a message that has the record's fields, by the same names."""
    hints = _hints(kind)
    values = {field.name: _value(hints[field.name], getattr(message, field.name)) for field in fields(kind)}
    return kind(**values)


def _value(hint: type, value: Any) -> Any:
    if is_dataclass(hint):
        return record_of(hint, value)
    if get_origin(hint) is tuple:
        return tuple(_value(get_args(hint)[0], each) for each in value)
    return dict(value) if get_origin(hint) is Mapping else value


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
