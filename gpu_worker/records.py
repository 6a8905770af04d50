"""The records that cross the engine's seam: a request in, events out."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from carrel.process.histogram import NOTHING, Distribution


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens attended per KV head and layer, sinks and window included: a share of the prompt or a number.

    Exactly one field is set: `share` in (0, 1], `tokens` from 2 up.
    """

    share: float | None = None
    tokens: int | None = None

    def resolve(self, num_prompt_tokens: int) -> int:
        """Budget in tokens for a prompt of this length; at least the prompt's length means 'attend everything'."""
        if self.tokens is not None:
            return self.tokens
        # Binary fractions fall just below: 0.29 of 100 is 29.
        return max(2, int((self.share or 1.0) * num_prompt_tokens + 1e-9))


@dataclass(frozen=True, slots=True)
class HotCacheSize:
    """C, the slots of a recall sequence beside sinks and window: a share of the prompt, a number, or (neither) auto.

    Auto is the whole context if that is at most half of what is free, else that half, so that the next request finds
    room. Where sinks and window leave less than that half, it is what they leave.
    """

    share: float | None = None
    tokens: int | None = None

    @property
    def is_auto(self) -> bool:
        return self.share is None and self.tokens is None

    def num_slots(
        self, num_prompt_tokens: int, capacity: int, num_fixed_slots: int, num_free_slots: int
    ) -> int:
        """C in slots for each layer and head. capacity: tokens that the sequence may ever hold.

        num_fixed_slots: for sinks, window and the new token. num_free_slots: for all of them and C.
        """
        if self.tokens is not None:
            return self.tokens
        if self.share is not None:
            return math.ceil(self.share * num_prompt_tokens)
        return min(capacity, num_free_slots // 2, max(0, num_free_slots - num_fixed_slots))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, and what to tell of it. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and
    `min_p` 0 are off. `logprobs`: so many alternatives to each token, None: not even its own log probability;
    `prompt_logprobs`: the same of the prompt's tokens."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


class GrammarKind(enum.Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be: its text as the kind has it. `param`: the field of the API that asked for it."""

    kind: GrammarKind
    text: str
    param: str


class Constraint(Protocol):
    """Holds one answer to a grammar, token by token. For one thread."""

    @property
    def is_ready(self) -> bool:
        """Whether what `allowed` gives is there, or will be before a decode step is over."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer is all that it may be: nothing may follow but its end."""

    def take(self, token_id: int) -> None:
        """The answer goes on with this token, which is no end token. Raises RequestError where it cannot go on."""

    def allowed(self, vocab_size: int, end_token_ids: Collection[int]) -> npt.NDArray[np.int32]:
        """The tokens that may follow: [ceil(vocab_size / 32)], token t is bit t % 32 of word t // 32. End tokens are
        allowed where the answer may end, and nowhere else."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it. `num_prefill_tokens` 0 prefills all of the prompt (protocol P1).

    `prefix_salt`: requests of equal salt, and equal `cache_salt`, may share the KV of common prefixes, where
    `shares_prefix`. `session_id`: of the conversation; "" for none. `weight`: of the caller, beside others. `priority`:
    who is served first, the least; and who gives way last where room runs out. `policy_options`: fields of the policy,
    and their texts. `attention`: AttentionEvents are told. `constraint`: of this answer alone; None: it may be
    anything.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    policy: str
    budget: Budget
    num_prefill_tokens: int = 0
    measure: bool = False
    prefix_salt: bytes = b""
    session_id: str = ""
    shares_prefix: bool = True
    weight: float = 1.0
    cache_salt: str = ""
    priority: int = 0
    policy_options: tuple[tuple[str, str], ...] = ()
    attention: bool = False
    constraint: Constraint | None = None


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A new token; `logprob` and `top` (token id, logprob; best first) only when logprobs were asked for. `rank`: of a
    prompt's token among all, the likeliest 1."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """The next of the prompt's own tokens, from its second on, with all that is told; before the first new token."""

    tokens: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """How far a prompt is: tokens computed so far, each chunk of a layer as its share of the whole, and those that the
    store had. Together they are all of the prompt's prefill when it is done."""

    computed_tokens: int
    cached_tokens: int = 0


@dataclass(slots=True)
class Usage:
    """What a request cost; filled while it runs, complete in its CompleteEvent.

    device_bytes: of the slots that it held at its end, in all layers. host_bytes: of its rows in the arena then; 0
    where they were there for measuring only.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    policy: str = ""
    budget_tokens: int = 0
    context_tokens: int = 0
    offloaded_tokens: int = 0
    attended_tokens: float = 0.0
    window_tokens: float = 0.0
    hit_rate: float = 0.0
    bytes_moved: int = 0
    attention_mass: float | None = None
    recall_rate: float | None = None
    best_recall: float | None = None
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    index_wait_ms: float = 0.0
    decode_ms: float = 0.0
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CompleteEvent:
    """The last event of a request that ended well or was aborted. `stop_token_id` is set for STOP."""

    finish_reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The last event of a request that failed; `error` is a WorkerError."""

    error: Exception


@dataclass(frozen=True, slots=True)
class AttentionEvent:
    """What one decode step attended, in some layers; bucket i is the positions [i * bucket_tokens, (i + 1) *
    bucket_tokens).

    step: tokens of the answer so far. layers: that were seen; the first `dense_layers` attend everything. attended,
    on_device: uint16, little endian, [layers, kv_heads, buckets], tokens that were attended, and that have a slot;
    empty: all. host_tokens: whose rows lie in the arena, to be recalled. shared_tokens: of the prompt, that a known
    prefix gave. hit_rate, bytes_moved, attended_tokens: since the first step, as a moment ago.
    """

    step: int
    context_tokens: int
    bucket_tokens: int
    layers: tuple[int, ...]
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


Event = TokenEvent | PromptEvent | ProgressEvent | AttentionEvent | CompleteEvent | ErrorEvent
EventSink = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class SessionCard:
    """What a session of a caller holds in the store: the whole slabs of its last prompt.

    bytes: of the arena; those that other sessions hold too are counted in each. Times are Unix times in seconds;
    expires_at: when the pin ends, 0: not by itself.
    """

    session_id: str
    tokens: int
    bytes: int
    created_at: float
    last_used_at: float
    pinned: bool
    expires_at: float


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and gauges of now. Slots are counted in tokens, mean over layers and KV heads.

    prefilling: running requests whose prompt is in progress. prefilling_tokens, prefilling_tokens_left: of their
    prompts, and what is neither computed nor cached of them. waiting_tokens: of the prompts that wait.
    prompt_tokens_total: counted as they are computed, so that a prompt that was aborted half way counts half; those
    that the store had are cached_tokens_total. The last ones are of what the host does for the KV cache (`KVMeter`):
    decode_stall_seconds by cause, fallbacks_total by kind. selected_tokens_ratio: the share of its context that each
    request attended.
    """

    running: int = 0
    waiting: int = 0
    prefilling: int = 0
    prefilling_tokens: int = 0
    prefilling_tokens_left: int = 0
    waiting_tokens: int = 0
    slot_used_tokens: float = 0.0
    slot_capacity_tokens: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    requests_finished_total: int = 0
    requests_aborted_total: int = 0
    requests_failed_total: int = 0
    offloaded_bytes_total: int = 0
    fetched_bytes_total: int = 0
    selected_rows_total: int = 0
    hit_rows_total: int = 0
    store_reachable: bool = True
    preemptions_total: int = 0
    corrupt_segments_total: int = 0
    index_search_seconds: Distribution = NOTHING
    gather_seconds: Distribution = NOTHING
    h2d_copy_seconds: Distribution = NOTHING
    offload_seconds: Distribution = NOTHING
    decode_stall_seconds: Mapping[str, Distribution] = field(default_factory=dict)
    fallbacks_total: Mapping[str, int] = field(default_factory=dict)
    selected_tokens_ratio: Distribution = NOTHING


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a client may want to know of the engine; constant after start."""

    model: str
    model_type: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    policies: tuple[str, ...]
    default_policy: str
    default_budget: Budget
    num_parameters: int
    slot_capacity_tokens: int
    transport: str
    # Of the rows of one token in all layers.
    arena_token_bytes: int = 0
