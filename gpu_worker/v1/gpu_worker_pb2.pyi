from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs", "logit_bias", "prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    prompt_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("share", "tokens")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    share: float
    tokens: int
    def __init__(self, share: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "ebnf", "param")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    ebnf: str
    param: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., ebnf: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class Edition(_message.Message):
    __slots__ = ("version", "messages")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    version: str
    messages: str
    def __init__(self, version: _Optional[str] = ..., messages: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "policy", "budget", "num_prefill_tokens", "measure", "prefix_salt", "edition", "session_id", "priority", "weight", "cache_salt", "policy_options", "grammar", "attention")
    class PolicyOptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SALT_FIELD_NUMBER: _ClassVar[int]
    EDITION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    POLICY_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    policy: str
    budget: Budget
    num_prefill_tokens: int
    measure: bool
    prefix_salt: bytes
    edition: Edition
    session_id: str
    priority: int
    weight: float
    cache_salt: str
    policy_options: _containers.ScalarMap[str, str]
    grammar: Grammar
    attention: bool
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., policy: _Optional[str] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ..., num_prefill_tokens: _Optional[int] = ..., measure: bool = ..., prefix_salt: _Optional[bytes] = ..., edition: _Optional[_Union[Edition, _Mapping]] = ..., session_id: _Optional[str] = ..., priority: _Optional[int] = ..., weight: _Optional[float] = ..., cache_salt: _Optional[str] = ..., policy_options: _Optional[_Mapping[str, str]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., attention: bool = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("token_id", "logprob", "top", "rank")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    rank: int
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., rank: _Optional[int] = ...) -> None: ...

class PromptTokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "policy", "budget_tokens", "context_tokens", "offloaded_tokens", "attended_tokens", "window_tokens", "hit_rate", "bytes_moved", "attention_mass", "recall_rate", "queue_ms", "prefill_ms", "index_wait_ms", "decode_ms", "device_bytes", "host_bytes", "best_recall")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFLOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_MASS_FIELD_NUMBER: _ClassVar[int]
    RECALL_RATE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    INDEX_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    BEST_RECALL_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    policy: str
    budget_tokens: int
    context_tokens: int
    offloaded_tokens: int
    attended_tokens: float
    window_tokens: float
    hit_rate: float
    bytes_moved: int
    attention_mass: float
    recall_rate: float
    queue_ms: float
    prefill_ms: float
    index_wait_ms: float
    decode_ms: float
    device_bytes: int
    host_bytes: int
    best_recall: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., policy: _Optional[str] = ..., budget_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., offloaded_tokens: _Optional[int] = ..., attended_tokens: _Optional[float] = ..., window_tokens: _Optional[float] = ..., hit_rate: _Optional[float] = ..., bytes_moved: _Optional[int] = ..., attention_mass: _Optional[float] = ..., recall_rate: _Optional[float] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., index_wait_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., device_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., best_recall: _Optional[float] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("computed_tokens", "cached_tokens")
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    cached_tokens: int
    def __init__(self, computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Attention(_message.Message):
    __slots__ = ("step", "context_tokens", "bucket_tokens", "layers", "kv_heads", "attended", "on_device", "host_tokens", "shared_tokens", "family", "dense_layers", "hit_rate", "bytes_moved", "policy", "budget_tokens", "attended_tokens")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    DENSE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    step: int
    context_tokens: int
    bucket_tokens: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    kv_heads: int
    attended: bytes
    on_device: bytes
    host_tokens: int
    shared_tokens: int
    family: str
    dense_layers: int
    hit_rate: float
    bytes_moved: int
    policy: str
    budget_tokens: int
    attended_tokens: float
    def __init__(self, step: _Optional[int] = ..., context_tokens: _Optional[int] = ..., bucket_tokens: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., kv_heads: _Optional[int] = ..., attended: _Optional[bytes] = ..., on_device: _Optional[bytes] = ..., host_tokens: _Optional[int] = ..., shared_tokens: _Optional[int] = ..., family: _Optional[str] = ..., dense_layers: _Optional[int] = ..., hit_rate: _Optional[float] = ..., bytes_moved: _Optional[int] = ..., policy: _Optional[str] = ..., budget_tokens: _Optional[int] = ..., attended_tokens: _Optional[float] = ...) -> None: ...

class Complete(_message.Message):
    __slots__ = ("finish_reason", "stop_token_id", "usage")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    stop_token_id: int
    usage: Usage
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token", "progress", "complete", "prompt", "attention")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    token: Token
    progress: Progress
    complete: Complete
    prompt: PromptTokens
    attention: Attention
    def __init__(self, token: _Optional[_Union[Token, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., complete: _Optional[_Union[Complete, _Mapping]] = ..., prompt: _Optional[_Union[PromptTokens, _Mapping]] = ..., attention: _Optional[_Union[Attention, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("version", "model", "model_type", "device", "dtype", "vocab_size", "max_model_len", "max_num_seqs", "eos_token_ids", "policies", "default_policy", "default_budget", "num_parameters", "slot_capacity_tokens", "transport", "messages", "arena_token_bytes", "context_capacity")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_POLICY_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_BUDGET_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SLOT_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ARENA_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    model_type: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    policies: _containers.RepeatedScalarFieldContainer[str]
    default_policy: str
    default_budget: Budget
    num_parameters: int
    slot_capacity_tokens: int
    transport: str
    messages: str
    arena_token_bytes: int
    context_capacity: int
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., model_type: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., policies: _Optional[_Iterable[str]] = ..., default_policy: _Optional[str] = ..., default_budget: _Optional[_Union[Budget, _Mapping]] = ..., num_parameters: _Optional[int] = ..., slot_capacity_tokens: _Optional[int] = ..., transport: _Optional[str] = ..., messages: _Optional[str] = ..., arena_token_bytes: _Optional[int] = ..., context_capacity: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("running", "waiting", "slot_used_tokens", "slot_capacity_tokens", "prompt_tokens_total", "generation_tokens_total", "requests_finished_total", "requests_aborted_total", "requests_failed_total", "offloaded_bytes_total", "fetched_bytes_total", "selected_rows_total", "hit_rows_total", "store_reachable", "cached_tokens_total", "prefilling", "prefilling_tokens", "prefilling_tokens_left", "waiting_tokens", "preemptions_total", "corrupt_segments_total", "index_search_seconds", "gather_seconds", "h2d_copy_seconds", "offload_seconds", "decode_stall_seconds", "fallbacks_total", "selected_tokens_ratio", "context_capacity")
    class DecodeStallSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Histogram
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...
    class FallbacksTotalEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SLOT_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOT_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FINISHED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_ABORTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FAILED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    OFFLOADED_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SELECTED_ROWS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HIT_ROWS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STORE_REACHABLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_SEGMENTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    INDEX_SEARCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GATHER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    H2D_COPY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SELECTED_TOKENS_RATIO_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    slot_used_tokens: float
    slot_capacity_tokens: int
    prompt_tokens_total: int
    generation_tokens_total: int
    requests_finished_total: int
    requests_aborted_total: int
    requests_failed_total: int
    offloaded_bytes_total: int
    fetched_bytes_total: int
    selected_rows_total: int
    hit_rows_total: int
    store_reachable: bool
    cached_tokens_total: int
    prefilling: int
    prefilling_tokens: int
    prefilling_tokens_left: int
    waiting_tokens: int
    preemptions_total: int
    corrupt_segments_total: int
    index_search_seconds: Histogram
    gather_seconds: Histogram
    h2d_copy_seconds: Histogram
    offload_seconds: Histogram
    decode_stall_seconds: _containers.MessageMap[str, Histogram]
    fallbacks_total: _containers.ScalarMap[str, int]
    selected_tokens_ratio: Histogram
    context_capacity: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., slot_used_tokens: _Optional[float] = ..., slot_capacity_tokens: _Optional[int] = ..., prompt_tokens_total: _Optional[int] = ..., generation_tokens_total: _Optional[int] = ..., requests_finished_total: _Optional[int] = ..., requests_aborted_total: _Optional[int] = ..., requests_failed_total: _Optional[int] = ..., offloaded_bytes_total: _Optional[int] = ..., fetched_bytes_total: _Optional[int] = ..., selected_rows_total: _Optional[int] = ..., hit_rows_total: _Optional[int] = ..., store_reachable: bool = ..., cached_tokens_total: _Optional[int] = ..., prefilling: _Optional[int] = ..., prefilling_tokens: _Optional[int] = ..., prefilling_tokens_left: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., preemptions_total: _Optional[int] = ..., corrupt_segments_total: _Optional[int] = ..., index_search_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., gather_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., h2d_copy_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., offload_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., decode_stall_seconds: _Optional[_Mapping[str, Histogram]] = ..., fallbacks_total: _Optional[_Mapping[str, int]] = ..., selected_tokens_ratio: _Optional[_Union[Histogram, _Mapping]] = ..., context_capacity: _Optional[int] = ...) -> None: ...

class StoreStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreStatsResponse(_message.Message):
    __slots__ = ("arena_bytes", "reserved_bytes", "leased_bytes", "index_bytes", "pinned_bytes", "sequences", "indexes", "leases", "sessions", "prefix_lookup_tokens_total", "prefix_hit_tokens_total", "evicted_bytes_total", "evicted_sessions_total", "expired_leases_total", "gathered_rows_total", "index_trainings_total", "index_training_seconds_total", "call_bounds", "calls", "disk_bytes", "disk_written_bytes_total", "disk_read_bytes_total", "disk_skipped_total", "disk_errors_total", "disk_corrupt_files_total", "disk_lookup_tokens_total", "disk_hit_tokens_total", "index_queue_length", "index_search_seconds", "gather_seconds", "prefix_reuse_gap_seconds", "evicted_idle_seconds", "evicted_lifetime_seconds")
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LOOKUP_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EVICTED_SESSIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_LEASES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GATHERED_ROWS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    INDEX_TRAININGS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    INDEX_TRAINING_SECONDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CALL_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_WRITTEN_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DISK_READ_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DISK_SKIPPED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DISK_ERRORS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DISK_CORRUPT_FILES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DISK_LOOKUP_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DISK_HIT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    INDEX_QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    INDEX_SEARCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GATHER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_REUSE_GAP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_LIFETIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    arena_bytes: int
    reserved_bytes: int
    leased_bytes: int
    index_bytes: int
    pinned_bytes: int
    sequences: int
    indexes: int
    leases: int
    sessions: int
    prefix_lookup_tokens_total: int
    prefix_hit_tokens_total: int
    evicted_bytes_total: int
    evicted_sessions_total: int
    expired_leases_total: int
    gathered_rows_total: int
    index_trainings_total: int
    index_training_seconds_total: float
    call_bounds: _containers.RepeatedScalarFieldContainer[float]
    calls: _containers.RepeatedCompositeFieldContainer[StoreCalls]
    disk_bytes: int
    disk_written_bytes_total: int
    disk_read_bytes_total: int
    disk_skipped_total: int
    disk_errors_total: int
    disk_corrupt_files_total: int
    disk_lookup_tokens_total: int
    disk_hit_tokens_total: int
    index_queue_length: int
    index_search_seconds: Histogram
    gather_seconds: Histogram
    prefix_reuse_gap_seconds: Histogram
    evicted_idle_seconds: Histogram
    evicted_lifetime_seconds: Histogram
    def __init__(self, arena_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., index_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., sequences: _Optional[int] = ..., indexes: _Optional[int] = ..., leases: _Optional[int] = ..., sessions: _Optional[int] = ..., prefix_lookup_tokens_total: _Optional[int] = ..., prefix_hit_tokens_total: _Optional[int] = ..., evicted_bytes_total: _Optional[int] = ..., evicted_sessions_total: _Optional[int] = ..., expired_leases_total: _Optional[int] = ..., gathered_rows_total: _Optional[int] = ..., index_trainings_total: _Optional[int] = ..., index_training_seconds_total: _Optional[float] = ..., call_bounds: _Optional[_Iterable[float]] = ..., calls: _Optional[_Iterable[_Union[StoreCalls, _Mapping]]] = ..., disk_bytes: _Optional[int] = ..., disk_written_bytes_total: _Optional[int] = ..., disk_read_bytes_total: _Optional[int] = ..., disk_skipped_total: _Optional[int] = ..., disk_errors_total: _Optional[int] = ..., disk_corrupt_files_total: _Optional[int] = ..., disk_lookup_tokens_total: _Optional[int] = ..., disk_hit_tokens_total: _Optional[int] = ..., index_queue_length: _Optional[int] = ..., index_search_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., gather_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., prefix_reuse_gap_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., evicted_idle_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., evicted_lifetime_seconds: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...

class StoreCalls(_message.Message):
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

class Session(_message.Message):
    __slots__ = ("session_id", "tokens", "bytes", "created_at", "last_used_at", "pinned", "expires_at")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_AT_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tokens: int
    bytes: int
    created_at: float
    last_used_at: float
    pinned: bool
    expires_at: float
    def __init__(self, session_id: _Optional[str] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., created_at: _Optional[float] = ..., last_used_at: _Optional[float] = ..., pinned: bool = ..., expires_at: _Optional[float] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("prefix_salt", "session_id")
    PREFIX_SALT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    prefix_salt: bytes
    session_id: str
    def __init__(self, prefix_salt: _Optional[bytes] = ..., session_id: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "slab_tokens")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SLAB_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    slab_tokens: int
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., slab_tokens: _Optional[int] = ...) -> None: ...

class PinSessionRequest(_message.Message):
    __slots__ = ("prefix_salt", "session_id", "pinned", "seconds")
    PREFIX_SALT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    prefix_salt: bytes
    session_id: str
    pinned: bool
    seconds: float
    def __init__(self, prefix_salt: _Optional[bytes] = ..., session_id: _Optional[str] = ..., pinned: bool = ..., seconds: _Optional[float] = ...) -> None: ...

class PinSessionResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class DropSessionRequest(_message.Message):
    __slots__ = ("prefix_salt", "session_id")
    PREFIX_SALT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    prefix_salt: bytes
    session_id: str
    def __init__(self, prefix_salt: _Optional[bytes] = ..., session_id: _Optional[str] = ...) -> None: ...

class DropSessionResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...
