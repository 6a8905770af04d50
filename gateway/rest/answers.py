"""Answers as the API document has them, and as they are written: fields that are not set are left out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from gateway.rest.schemas import Body

Finish = Literal["stop", "length", "tool_calls"]
TokenIdList = Annotated[list[int] | None, Field(description="with return_token_ids")]


class ErrorTold(Body):
    message: str
    type: str
    param: str | None
    code: str | int


class ErrorAnswer(Body):
    """An error of every route but `/v1/messages`, which answers with Anthropic's."""

    error: ErrorTold


class CachedTokens(Body):
    cached_tokens: int


class Timings(Body):
    """Milliseconds."""

    ttft_ms: float
    queue_ms: float
    prefill_ms: float
    index_wait_ms: float
    decode_ms: float


class CarrelUsage(Body):
    """The cost of a request, and how much was attended; see docs/api.md."""

    policy: str
    budget_tokens: int
    context_tokens: int
    cached_tokens: int
    offloaded_tokens: int
    attended_tokens: float
    window_tokens: float
    hit_rate: float
    bytes_moved: int
    timings: Timings


class UsageAnswer(Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    carrel: CarrelUsage | None = None


class Progress(Body):
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int


class ChunkExtension(Body):
    progress: Progress


class TopToken(Body):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TopToken):
    top_logprobs: list[TopToken]


class ChatLogprobs(Body):
    content: list[ChatToken]
    refusal: None = None


class CalledFunction(Body):
    name: str = ""
    arguments: str


class ToolCallAnswer(Body):
    """In a stream a call has an `index`, and its first piece alone id, type and name."""

    index: int = 0
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatDelta(Body):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatMessage(ChatDelta):
    refusal: None = None


class PromptToken(TypedDict):
    """A dict: of a prompt there may be hundreds of thousands."""

    logprob: float
    rank: Annotated[int | None, Field(description="among all tokens, the likeliest 1")]
    decoded_token: str


PromptTokens = Annotated[
    list[dict[str, PromptToken] | None] | None,
    Field(
        description="with prompt_logprobs: each token and the likeliest by their ids; of the first nothing"
    ),
]


class ChatChoice(Body):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: TokenIdList = None
    prompt_token_ids: TokenIdList = None


class GenerationAnswer(Body):
    """Fields that chats and completions share."""

    id: str
    created: int
    model: str
    usage: UsageAnswer | None = None
    error: Annotated[
        ErrorTold | None, Field(description="of an answer that its deadline cut off, with status 504")
    ] = None


class ChatAnswer(GenerationAnswer):
    """A stream has `chat.completion.chunk` instead, with `delta` for `message`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptTokens = None


class ChatChunkChoice(Body):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: TokenIdList = None
    prompt_token_ids: TokenIdList = None


class ChatChunk(GenerationAnswer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    carrel: ChunkExtension | None = None


class CompletionLogprobs(Body):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    token_ids: TokenIdList = None
    prompt_token_ids: TokenIdList = None
    prompt_logprobs: PromptTokens = None


class CompletionAnswer(GenerationAnswer):
    """A stream has pieces of it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(CompletionAnswer):
    carrel: ChunkExtension | None = None


class ModelPolicies(Body):
    policies: Annotated[list[str], Field(description="that requests may name")]
    policy: Annotated[str, Field(description="of requests that name none")]
    budget: Annotated[float | None, Field(description="of requests that name none")]


class ModelAnswer(Body):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    carrel: ModelPolicies


class ModelListAnswer(Body):
    object: Literal["list"] = "list"
    data: list[ModelAnswer]


class TokenizedAnswer(Body):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizedAnswer(Body):
    prompt: str


class AttentionAnswer(Body):
    """The newest view of what a request attends; the id alone before there is one."""

    object: Literal["attention"]
    id: str
    prompt_tokens: int | None = None
    step: int | None = None
    policy: str | None = None
    family: str | None = None
    context_tokens: int | None = None
    shared_tokens: int | None = None
    host_tokens: int | None = None
    budget_tokens: int | None = None
    attended_tokens: float | None = None
    hit_rate: float | None = None
    bytes_moved: int | None = None
    layers: Annotated[list[int] | None, Field(description="that are looked at")] = None
    dense_layers: Annotated[int | None, Field(description="the first, which attend every token")] = None
    kv_heads: int | None = None
    layer: Annotated[int | None, Field(description="that is shown; null: the mean over them")] = None
    head: Annotated[int | None, Field(description="that is shown; null: the mean over them")] = None
    bucket_tokens: int | None = None
    attended: Annotated[list[float] | None, Field(description="the share of each bucket's tokens")] = None
    on_device: Annotated[list[float] | None, Field(description="the share of each bucket's tokens")] = None


class StatusAnswer(Body):
    status: Literal["ok", "ready"]


class VersionAnswer(Body):
    version: str


class ServerLimits(Body):
    """Limits of requests at the gateway."""

    max_concurrent: int
    max_concurrent_per_key: int | None
    max_body_bytes: int
    request_timeout_seconds: float


class ServerInfoAnswer(Body):
    version: str
    model: str
    model_type: str
    names: Annotated[list[str], Field(description="that it is served by")]
    device: str
    dtype: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    slot_capacity_tokens: int
    context_capacity: Annotated[
        int, Field(description="requests of max_model_len at once, with their caches in host memory")
    ]
    transport: str
    policies: list[str]
    default_policy: str
    default_budget: float | None
    limits: ServerLimits


class LoadAnswer(Body):
    """Requests and tokens of now."""

    requests: Annotated[int, Field(description="at the gateway")]
    running: Annotated[int, Field(description="in the worker, those whose prompts are computed included")]
    waiting: int
    prefilling: int
    prefilling_tokens_left: int
    waiting_tokens: int
    slot_used_tokens: float
    slot_capacity_tokens: int
