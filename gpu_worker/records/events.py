"""Events of a running request, and its cost at its end."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A new token; `logprob` and `top` (token id, logprob; best first) only when logprobs were asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PromptEvent:
    """How likely the prompt's own T tokens are, from its second on; before the first new token. Arrays: a record of
    each token of a long prompt takes the engine's thread half a second.

    logprobs: [T, 1 + k] float32, of the token itself, then of the k likeliest, best first. numbers: [T, 1 + k] int64,
    the token's rank among all, the likeliest 1, then the likeliest's ids. Nothing writes to them any more.
    """

    token_ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]
    numbers: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """How far a prompt is: tokens computed so far, each chunk of a layer as its share of the whole, and those that the
    store had. Together they are all of the prompt's prefill when it is done."""

    computed_tokens: int
    cached_tokens: int = 0


@dataclass(slots=True)
class Usage:
    """The cost of a request; filled while it runs, complete in its CompleteEvent.

    device_bytes: of the slots that it held at its end, in all layers.
    host_bytes: of its rows in the arena at its end; 0 where they were there for measuring only.
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
    """The tokens that one decode step attended, in some layers. Bucket i is the positions [i * bucket_tokens, (i + 1) *
    bucket_tokens).

    step: tokens of the answer so far.
    layers: layers that were observed; the first `dense_layers` attend everything.
    attended: uint16, little endian, [layers, kv_heads, buckets], tokens that were attended; empty: all.
    on_device: the same, of tokens that have a slot.
    host_tokens: tokens to be recalled from the arena.
    shared_tokens: tokens of the prompt that a known prefix gave.
    hit_rate, bytes_moved, attended_tokens: since the first step, as of a moment ago.
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
