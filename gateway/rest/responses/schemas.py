"""Bodies of `/v1/responses` as OpenAI's clients send them, and its answers and the events of its streams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from gateway.grammars import JsonSchema
from gateway.rest.answers import CachedTokens, CarrelUsage, ChatToken
from gateway.rest.fields import CacheKey, FunctionName, Hidden, OneByOne, Refused, Texts, refused, within
from gateway.rest.schemas import AnswerBody, Body, Sampling, Tagged
from gateway.tool_calls.checks import MAX_TOOLS


class Part(Body):
    type: str
    text: str | None = None


class InputItem(Body):
    """A message, a call (function_call) or the answer to one (function_call_output)."""

    type: str = "message"
    role: str | None = None
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    call_id: str | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    is_async: Annotated[Hidden, refused(), Field(alias="async")] = None
    namespace: Annotated[str | None, Field(description="of a call's function")] = None


class TextFormat(Body):
    type: Annotated[str, Field(description="text, json_object or json_schema")]
    name: str | None = None
    json_schema: Annotated[JsonSchema | None, Field(alias="schema")] = None


class FunctionTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Annotated[Hidden, refused(["direct"])] = None
    defer_loading: Refused = None
    is_async: Annotated[Hidden, refused(), Field(alias="async")] = None
    output_schema: Refused = None


class OfferedTool(FunctionTool):
    """A function, or a namespace of several."""

    type: Literal["function", "namespace"]  # type: ignore[assignment]
    tools: Annotated[
        list[FunctionTool] | None, Field(fail_fast=True, max_length=MAX_TOOLS, description="of a namespace")
    ] = None


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(fail_fast=True, max_length=MAX_TOOLS)]


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Hidden, refused("medium")] = None


class Reasoning(Body):
    """The model thinks as its chat template lets it."""

    context: Annotated[Hidden, refused("auto")] = None
    effort: Annotated[Hidden, refused("medium")] = None
    generate_summary: Refused = None
    mode: Annotated[Hidden, refused("standard")] = None
    # as the server likes: none
    summary: Annotated[Hidden, refused("auto")] = None


class CacheOptions(Body):
    """Every prompt is cached."""

    prewarm: Refused = None


class ResponsesBody(AnswerBody):
    """Others are kept, so that their reader can refuse some."""

    model_config = ConfigDict(extra="allow")

    input: str | Annotated[list[InputItem], Field(fail_fast=True)]
    instructions: Annotated[
        str | None, Field(description="before the conversation, of this request only")
    ] = None
    previous_response_id: Annotated[str | None, Field(description="of a response that is gone on from")] = (
        None
    )
    store: Annotated[
        bool | None, Field(description="keep it, so that others go on from it; true by default")
    ] = None
    max_output_tokens: Annotated[int, within("max_tokens")] | None = None
    include: Texts | None = None
    top_logprobs: Annotated[int, within("logprobs")] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[OfferedTool] | None, Field(fail_fast=True, max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[
        Annotated[dict[str, str], OneByOne] | None, Field(description="comes back with the answer")
    ] = None
    user: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: Reasoning | None = None
    prompt_cache_key: CacheKey = None
    prompt_cache_options: CacheOptions | None = None


Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Tagged):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any]
    logprobs: list[ChatToken]


class OutputMessage(Tagged):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningText(Tagged):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputThought(Tagged):
    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any]
    content: list[ReasoningText]
    status: Status


class OutputCall(Tagged):
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    namespace: Annotated[str | None, Field(description="of the function, where it has one")] = None
    arguments: str
    status: Status


Output = OutputMessage | OutputThought | OutputCall


class ReasoningTokens(Body):
    reasoning_tokens: int


class ResponseUsage(Body):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int
    carrel: Annotated[CarrelUsage | None, Field(description="as of a chat's usage")] = None


class ResponseAnswer(Sampling):
    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Output]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, None]
    store: bool
    text: TextOptions
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions
    tools: list[Any]
    top_logprobs: int | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseDroppedAnswer(Body):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class StreamEvent(Tagged):
    """An event of a stream. Each is numbered as it is sent."""

    sequence_number: int = 0


class ResponseEvent(StreamEvent):
    type: Literal["response.created", "response.in_progress", "response.completed", "response.incomplete"]
    response: ResponseAnswer


class ItemEvent(StreamEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Output


class PieceEvent(StreamEvent):
    """An event within an item of the output."""

    item_id: str
    output_index: int


class PartEvent(PieceEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputText | ReasoningText


class TextEvent(PieceEvent):
    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    content_index: int
    delta: str
    logprobs: Annotated[list[ChatToken] | None, Field(description="of the answer's text")] = None


class TextDoneEvent(PieceEvent):
    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    content_index: int
    text: str
    logprobs: Annotated[list[ChatToken] | None, Field(description="of the answer's text")] = None


class ArgumentsEvent(PieceEvent):
    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    delta: str


class ArgumentsDoneEvent(PieceEvent):
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    name: str
    arguments: str


class ErrorEvent(StreamEvent):
    type: Literal["error"] = "error"
    code: str
    message: str
    param: str | None


EVENTS: tuple[type[StreamEvent], ...] = (
    ResponseEvent,
    ItemEvent,
    PartEvent,
    TextEvent,
    TextDoneEvent,
    ArgumentsEvent,
    ArgumentsDoneEvent,
    ErrorEvent,
)
