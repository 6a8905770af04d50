from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_TYPE_UNSPECIFIED: _ClassVar[RowType]
    ROW_TYPE_BF16: _ClassVar[RowType]
    ROW_TYPE_FP16: _ClassVar[RowType]
    ROW_TYPE_FP32: _ClassVar[RowType]

class IndexKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INDEX_KIND_UNSPECIFIED: _ClassVar[IndexKind]
    INDEX_KIND_PQ: _ClassVar[IndexKind]
    INDEX_KIND_KMEANS: _ClassVar[IndexKind]
    INDEX_KIND_BITS: _ClassVar[IndexKind]

class Metric(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    METRIC_UNSPECIFIED: _ClassVar[Metric]
    METRIC_L2: _ClassVar[Metric]
    METRIC_COSINE: _ClassVar[Metric]
    METRIC_INNER_PRODUCT: _ClassVar[Metric]
ROW_TYPE_UNSPECIFIED: RowType
ROW_TYPE_BF16: RowType
ROW_TYPE_FP16: RowType
ROW_TYPE_FP32: RowType
INDEX_KIND_UNSPECIFIED: IndexKind
INDEX_KIND_PQ: IndexKind
INDEX_KIND_KMEANS: IndexKind
INDEX_KIND_BITS: IndexKind
METRIC_UNSPECIFIED: Metric
METRIC_L2: Metric
METRIC_COSINE: Metric
METRIC_INNER_PRODUCT: Metric

class Layout(_message.Message):
    __slots__ = ("version", "num_layers", "num_kv_heads", "head_dim", "row_type")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    ROW_TYPE_FIELD_NUMBER: _ClassVar[int]
    version: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    row_type: RowType
    def __init__(self, version: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., row_type: _Optional[_Union[RowType, str]] = ...) -> None: ...

class Edition(_message.Message):
    __slots__ = ("version", "messages")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    version: str
    messages: str
    def __init__(self, version: _Optional[str] = ..., messages: _Optional[str] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("edition",)
    EDITION_FIELD_NUMBER: _ClassVar[int]
    edition: Edition
    def __init__(self, edition: _Optional[_Union[Edition, _Mapping]] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("edition",)
    EDITION_FIELD_NUMBER: _ClassVar[int]
    edition: Edition
    def __init__(self, edition: _Optional[_Union[Edition, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("worker_id", "layout", "max_gather_rows", "edition")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_GATHER_ROWS_FIELD_NUMBER: _ClassVar[int]
    EDITION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    layout: Layout
    max_gather_rows: int
    edition: Edition
    def __init__(self, worker_id: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., max_gather_rows: _Optional[int] = ..., edition: _Optional[_Union[Edition, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("region_id", "epoch", "arena_bytes", "slab_bytes", "tokens_per_slab", "arena_socket", "response_offset", "response_bytes", "lease_seconds", "edition")
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SLAB_FIELD_NUMBER: _ClassVar[int]
    ARENA_SOCKET_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EDITION_FIELD_NUMBER: _ClassVar[int]
    region_id: bytes
    epoch: int
    arena_bytes: int
    slab_bytes: int
    tokens_per_slab: int
    arena_socket: str
    response_offset: int
    response_bytes: int
    lease_seconds: float
    edition: Edition
    def __init__(self, region_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., slab_bytes: _Optional[int] = ..., tokens_per_slab: _Optional[int] = ..., arena_socket: _Optional[str] = ..., response_offset: _Optional[int] = ..., response_bytes: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., edition: _Optional[_Union[Edition, _Mapping]] = ...) -> None: ...

class BeginRequest(_message.Message):
    __slots__ = ("epoch", "worker_id", "sequence_id", "num_tokens", "prefix_hashes", "takes_less", "owner")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    TAKES_LESS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    sequence_id: str
    num_tokens: int
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    takes_less: bool
    owner: str
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., sequence_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ..., takes_less: bool = ..., owner: _Optional[str] = ...) -> None: ...

class BeginResponse(_message.Message):
    __slots__ = ("num_shared_tokens", "slab_table", "slabs_per_layer")
    NUM_SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLAB_TABLE_FIELD_NUMBER: _ClassVar[int]
    SLABS_PER_LAYER_FIELD_NUMBER: _ClassVar[int]
    num_shared_tokens: int
    slab_table: _containers.RepeatedScalarFieldContainer[int]
    slabs_per_layer: int
    def __init__(self, num_shared_tokens: _Optional[int] = ..., slab_table: _Optional[_Iterable[int]] = ..., slabs_per_layer: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("epoch", "worker_id", "sequence_id", "num_tokens")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    sequence_id: str
    num_tokens: int
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., sequence_id: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("slab_table", "slabs_per_layer")
    SLAB_TABLE_FIELD_NUMBER: _ClassVar[int]
    SLABS_PER_LAYER_FIELD_NUMBER: _ClassVar[int]
    slab_table: _containers.RepeatedScalarFieldContainer[int]
    slabs_per_layer: int
    def __init__(self, slab_table: _Optional[_Iterable[int]] = ..., slabs_per_layer: _Optional[int] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ("epoch", "worker_id", "sequence_id", "layer_begin", "layer_end", "num_tokens", "prefix_hashes", "session_id", "session_label")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_LABEL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    sequence_id: str
    layer_begin: int
    layer_end: int
    num_tokens: int
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    session_id: str
    session_label: str
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., sequence_id: _Optional[str] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., num_tokens: _Optional[int] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ..., session_id: _Optional[str] = ..., session_label: _Optional[str] = ...) -> None: ...

class SealResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("epoch", "worker_id", "sequence_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    sequence_id: str
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., sequence_id: _Optional[str] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("num_corrupt",)
    NUM_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    num_corrupt: int
    def __init__(self, num_corrupt: _Optional[int] = ...) -> None: ...

class PQParams(_message.Message):
    __slots__ = ("num_subvectors", "num_bits", "max_iterations", "metric", "codebooks_only")
    NUM_SUBVECTORS_FIELD_NUMBER: _ClassVar[int]
    NUM_BITS_FIELD_NUMBER: _ClassVar[int]
    MAX_ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    CODEBOOKS_ONLY_FIELD_NUMBER: _ClassVar[int]
    num_subvectors: int
    num_bits: int
    max_iterations: int
    metric: Metric
    codebooks_only: bool
    def __init__(self, num_subvectors: _Optional[int] = ..., num_bits: _Optional[int] = ..., max_iterations: _Optional[int] = ..., metric: _Optional[_Union[Metric, str]] = ..., codebooks_only: bool = ...) -> None: ...

class KMeansParams(_message.Message):
    __slots__ = ("num_clusters", "metric", "max_iterations")
    NUM_CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    MAX_ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    num_clusters: int
    metric: Metric
    max_iterations: int
    def __init__(self, num_clusters: _Optional[int] = ..., metric: _Optional[_Union[Metric, str]] = ..., max_iterations: _Optional[int] = ...) -> None: ...

class BitParams(_message.Message):
    __slots__ = ("num_sinks",)
    NUM_SINKS_FIELD_NUMBER: _ClassVar[int]
    num_sinks: int
    def __init__(self, num_sinks: _Optional[int] = ...) -> None: ...

class BuildIndexRequest(_message.Message):
    __slots__ = ("epoch", "worker_id", "sequence_id", "layer", "token_begin", "token_end", "pq", "kmeans", "bits", "seed", "prefill_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BEGIN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    PQ_FIELD_NUMBER: _ClassVar[int]
    KMEANS_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    sequence_id: str
    layer: int
    token_begin: int
    token_end: int
    pq: PQParams
    kmeans: KMeansParams
    bits: BitParams
    seed: int
    prefill_seconds: float
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., sequence_id: _Optional[str] = ..., layer: _Optional[int] = ..., token_begin: _Optional[int] = ..., token_end: _Optional[int] = ..., pq: _Optional[_Union[PQParams, _Mapping]] = ..., kmeans: _Optional[_Union[KMeansParams, _Mapping]] = ..., bits: _Optional[_Union[BitParams, _Mapping]] = ..., seed: _Optional[int] = ..., prefill_seconds: _Optional[float] = ...) -> None: ...

class ArrayRef(_message.Message):
    __slots__ = ("name", "offset", "num_bytes", "dtype", "shape", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    num_bytes: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    checksum: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., checksum: _Optional[int] = ...) -> None: ...

class BuildIndexResponse(_message.Message):
    __slots__ = ("kind", "arrays", "training_seconds", "iterations")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    kind: IndexKind
    arrays: _containers.RepeatedCompositeFieldContainer[ArrayRef]
    training_seconds: float
    iterations: int
    def __init__(self, kind: _Optional[_Union[IndexKind, str]] = ..., arrays: _Optional[_Iterable[_Union[ArrayRef, _Mapping]]] = ..., training_seconds: _Optional[float] = ..., iterations: _Optional[int] = ...) -> None: ...

class TopKItem(_message.Message):
    __slots__ = ("sequence_id", "token_begin", "token_end", "k", "queries", "resident")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BEGIN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    token_begin: int
    token_end: int
    k: int
    queries: bytes
    resident: bytes
    def __init__(self, sequence_id: _Optional[str] = ..., token_begin: _Optional[int] = ..., token_end: _Optional[int] = ..., k: _Optional[int] = ..., queries: _Optional[bytes] = ..., resident: _Optional[bytes] = ...) -> None: ...

class TopKRequest(_message.Message):
    __slots__ = ("epoch", "worker_id", "layer", "scale", "items")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    layer: int
    scale: float
    items: _containers.RepeatedCompositeFieldContainer[TopKItem]
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., layer: _Optional[int] = ..., scale: _Optional[float] = ..., items: _Optional[_Iterable[_Union[TopKItem, _Mapping]]] = ...) -> None: ...

class GatherItem(_message.Message):
    __slots__ = ("sequence_id", "layer", "kv_head", "positions")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    layer: int
    kv_head: int
    positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_id: _Optional[str] = ..., layer: _Optional[int] = ..., kv_head: _Optional[int] = ..., positions: _Optional[_Iterable[int]] = ...) -> None: ...

class GatherRequest(_message.Message):
    __slots__ = ("epoch", "worker_id", "items")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    items: _containers.RepeatedCompositeFieldContainer[GatherItem]
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., items: _Optional[_Iterable[_Union[GatherItem, _Mapping]]] = ...) -> None: ...

class GatherResponse(_message.Message):
    __slots__ = ("offset", "num_rows")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    num_rows: int
    def __init__(self, offset: _Optional[int] = ..., num_rows: _Optional[int] = ...) -> None: ...

class RowsChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class PutRowsRequest(_message.Message):
    __slots__ = ("epoch", "worker_id", "sequence_id", "layer", "token_begin", "num_tokens", "data")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BEGIN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    sequence_id: str
    layer: int
    token_begin: int
    num_tokens: int
    data: bytes
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., sequence_id: _Optional[str] = ..., layer: _Optional[int] = ..., token_begin: _Optional[int] = ..., num_tokens: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutRowsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SequenceEnd(_message.Message):
    __slots__ = ("sequence_id", "num_tokens", "prefix_hashes", "session_id", "keeps_prefix", "session_label")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEEPS_PREFIX_FIELD_NUMBER: _ClassVar[int]
    SESSION_LABEL_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    num_tokens: int
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    session_id: str
    keeps_prefix: bool
    session_label: str
    def __init__(self, sequence_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ..., session_id: _Optional[str] = ..., keeps_prefix: bool = ..., session_label: _Optional[str] = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ("epoch", "worker_id", "ends")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    ends: _containers.RepeatedCompositeFieldContainer[SequenceEnd]
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., ends: _Optional[_Iterable[_Union[SequenceEnd, _Mapping]]] = ...) -> None: ...

class EndResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("epoch", "worker_id", "owner")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    owner: str
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., owner: _Optional[str] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "label", "num_tokens", "num_bytes", "created_at", "used_at", "is_pinned", "pinned_until")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    USED_AT_FIELD_NUMBER: _ClassVar[int]
    IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    PINNED_UNTIL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    label: str
    num_tokens: int
    num_bytes: int
    created_at: float
    used_at: float
    is_pinned: bool
    pinned_until: float
    def __init__(self, session_id: _Optional[str] = ..., label: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., created_at: _Optional[float] = ..., used_at: _Optional[float] = ..., is_pinned: bool = ..., pinned_until: _Optional[float] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ...) -> None: ...

class PinSessionRequest(_message.Message):
    __slots__ = ("epoch", "worker_id", "session_id", "is_pinned", "seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    session_id: str
    is_pinned: bool
    seconds: float
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., session_id: _Optional[str] = ..., is_pinned: bool = ..., seconds: _Optional[float] = ...) -> None: ...

class PinSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropSessionRequest(_message.Message):
    __slots__ = ("epoch", "worker_id", "session_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    session_id: str
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class DropSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("epoch", "worker_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SequenceStats(_message.Message):
    __slots__ = ("sequence_id", "worker_id", "num_tokens", "held_bytes", "reserved_bytes")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    worker_id: str
    num_tokens: int
    held_bytes: int
    reserved_bytes: int
    def __init__(self, sequence_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., held_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ...) -> None: ...

class DiskStats(_message.Message):
    __slots__ = ("num_bytes", "written_bytes", "read_bytes", "num_skipped", "num_errors", "num_corrupt", "lookup_tokens", "hit_tokens")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_ERRORS_FIELD_NUMBER: _ClassVar[int]
    NUM_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    written_bytes: int
    read_bytes: int
    num_skipped: int
    num_errors: int
    num_corrupt: int
    lookup_tokens: int
    hit_tokens: int
    def __init__(self, num_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., read_bytes: _Optional[int] = ..., num_skipped: _Optional[int] = ..., num_errors: _Optional[int] = ..., num_corrupt: _Optional[int] = ..., lookup_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class StoreTimes(_message.Message):
    __slots__ = ("index_search", "gather", "prefix_reuse_gap", "evicted_idle", "evicted_lifetime")
    INDEX_SEARCH_FIELD_NUMBER: _ClassVar[int]
    GATHER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_REUSE_GAP_FIELD_NUMBER: _ClassVar[int]
    EVICTED_IDLE_FIELD_NUMBER: _ClassVar[int]
    EVICTED_LIFETIME_FIELD_NUMBER: _ClassVar[int]
    index_search: Histogram
    gather: Histogram
    prefix_reuse_gap: Histogram
    evicted_idle: Histogram
    evicted_lifetime: Histogram
    def __init__(self, index_search: _Optional[_Union[Histogram, _Mapping]] = ..., gather: _Optional[_Union[Histogram, _Mapping]] = ..., prefix_reuse_gap: _Optional[_Union[Histogram, _Mapping]] = ..., evicted_idle: _Optional[_Union[Histogram, _Mapping]] = ..., evicted_lifetime: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("epoch", "arena_bytes", "held_bytes", "reserved_bytes", "leased_bytes", "index_bytes", "num_sequences", "num_indexes", "num_workers", "num_sessions", "training_seconds", "gathered_rows", "sequences", "pinned_bytes", "num_trainings", "prefix_lookup_tokens", "prefix_hit_tokens", "evicted_bytes", "evicted_sessions", "expired_leases", "call_bounds", "calls", "disk", "times", "num_pending_trainings")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_INDEXES_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GATHERED_ROWS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAININGS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    CALL_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_TRAININGS_FIELD_NUMBER: _ClassVar[int]
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
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceStats]
    pinned_bytes: int
    num_trainings: int
    prefix_lookup_tokens: int
    prefix_hit_tokens: int
    evicted_bytes: int
    evicted_sessions: int
    expired_leases: int
    call_bounds: _containers.RepeatedScalarFieldContainer[float]
    calls: _containers.RepeatedCompositeFieldContainer[CallStats]
    disk: DiskStats
    times: StoreTimes
    num_pending_trainings: int
    def __init__(self, epoch: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., index_bytes: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_indexes: _Optional[int] = ..., num_workers: _Optional[int] = ..., num_sessions: _Optional[int] = ..., training_seconds: _Optional[float] = ..., gathered_rows: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceStats, _Mapping]]] = ..., pinned_bytes: _Optional[int] = ..., num_trainings: _Optional[int] = ..., prefix_lookup_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., evicted_bytes: _Optional[int] = ..., evicted_sessions: _Optional[int] = ..., expired_leases: _Optional[int] = ..., call_bounds: _Optional[_Iterable[float]] = ..., calls: _Optional[_Iterable[_Union[CallStats, _Mapping]]] = ..., disk: _Optional[_Union[DiskStats, _Mapping]] = ..., times: _Optional[_Union[StoreTimes, _Mapping]] = ..., num_pending_trainings: _Optional[int] = ...) -> None: ...

class CallStats(_message.Message):
    __slots__ = ("method", "seconds", "counts", "codes")
    class CodesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    METHOD_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    CODES_FIELD_NUMBER: _ClassVar[int]
    method: str
    seconds: float
    counts: _containers.RepeatedScalarFieldContainer[int]
    codes: _containers.ScalarMap[str, int]
    def __init__(self, method: _Optional[str] = ..., seconds: _Optional[float] = ..., counts: _Optional[_Iterable[int]] = ..., codes: _Optional[_Mapping[str, int]] = ...) -> None: ...
