"""The records of the gateway: requests in, events out, and what the worker says. No protocol in here."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens attended per KV head and layer: a share of the prompt in (0, 1], or a number. One of the two is set."""

    share: float | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class CarrelOptions:
    """The extension field `carrel`; None leaves the choice to the worker."""

    policy: str | None = None
    budget: Budget | None = None


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What a request may say besides its prompt; None takes the default. Ranges are checked by the service."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    # alternatives per token; None: no logprobs at all
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    carrel: CarrelOptions = CarrelOptions()
    # of the conversation whose turn it is
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    messages: tuple[Message, ...]
    options: GenerationOptions = GenerationOptions()
    template_arguments: Mapping[str, Scalar] = field(default_factory=dict)
    request_id: str | None = None
    caller: bytes = b""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Each prompt is text or token ids."""

    prompts: tuple[str | tuple[int, ...], ...]
    options: GenerationOptions = GenerationOptions()
    request_id: str | None = None
    caller: bytes = b""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What the worker is told, with every default applied."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    min_tokens: int
    logprobs: int | None
    logit_bias: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """One prompt for the worker. `timeout_s` is the call's deadline. `caller`: see `KeyRing.caller`; what is computed
    of prompts is shared among the requests of one. `session_id`: "" for none."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    carrel: CarrelOptions
    timeout_s: float
    caller: bytes = b""
    session_id: str = ""


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """The worker's account of one request; see the proto for each field."""

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
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    index_wait_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerToken:
    """A new token; `top` is (token id, logprob), best first."""

    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    prefilled_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerComplete:
    finish_reason: FinishReason
    usage: WorkerUsage


WorkerEvent = WorkerToken | WorkerProgress | WorkerComplete


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself; constant while it lives."""

    version: str
    model: str
    vocab_size: int
    max_model_len: int
    policies: tuple[str, ...]
    default_policy: str


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Counters since the worker's start, and gauges of now."""

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


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token as text, its log probability, and the best alternatives in order."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a whole request, all choices together; `carrel` is None when no worker account arrived."""

    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float
    carrel: WorkerUsage | None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def cached_tokens(self) -> int:
        return self.carrel.cached_tokens if self.carrel else 0


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Prompt tokens done so far; also the sign that the worker took the request."""

    index: int
    prefilled_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one choice; the text may be empty when only logprobs are new."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """Comes once per choice."""

    index: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Completed:
    """The last event of a request that ended well."""

    usage: Usage


Event = Prefilling | TextDelta | ChoiceFinished | Completed


@dataclass(frozen=True, slots=True)
class Generation:
    """An admitted request. `events` must be iterated to its end or closed: both free the admission."""

    request_id: str
    model: str
    created: int
    events: AsyncGenerator[Event, None]
