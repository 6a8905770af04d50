"""Bodies of `/v1/messages` as Anthropic's clients send them, and its answers and the events of its streams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from gateway.grammars import JsonSchema
from gateway.rest.answers import CarrelUsage
from gateway.rest.fields import FunctionName, Hidden, Refused, SessionName, Texts, TopK, refused, within
from gateway.rest.schemas import AnswerBody, Body, Tagged
from gateway.tool_calls.checks import MAX_TOOLS


class Block(Body):
    """A block of type text, thinking, tool_use (an assistant's call), tool_result (its answer) or tool_reference."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: Annotated[str | None, Field(description="of a call")] = None
    name: FunctionName | None = None
    input: Annotated[dict[str, Any] | None, Field(description="of a call")] = None
    tool_use_id: Annotated[str | None, Field(description="the call that this answers")] = None
    content: str | Annotated[list[Block], Field(fail_fast=True)] | None = None
    tool_name: Annotated[str | None, Field(description="of a reference: a tool that was searched for")] = None


Content = str | Annotated[list[Block], Field(fail_fast=True)]


class ToolDefinition(Body):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    allowed_callers: Annotated[Hidden, refused(["direct"])] = None
    defer_loading: Refused = None
    input_examples: Refused = None


class ToolChoiceBody(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, Field(description="of the tool, with the type tool")] = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: Annotated[JsonSchema, Field(alias="schema")]


class OutputConfig(Body):
    format: Annotated[OutputFormat | None, Field(description="what the answer's text must be")] = None
    effort: Annotated[Hidden, refused("high")] = None


class Thinking(Body):
    """A chat template with a switch obeys enabled and disabled. No budget can be held."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Refused = None
    display: Refused = None


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: Content


class CountBody(Body):
    """The parts of a prompt. Other fields are kept, so that the reader can refuse some."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: Annotated[list[Turn], Field(fail_fast=True)]
    system: Content | None = None
    tools: Annotated[list[ToolDefinition] | None, Field(fail_fast=True, max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoiceBody | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None


class MessagesBody(CountBody, AnswerBody):
    # of two bases the last says it
    model_config = ConfigDict(extra="allow")

    max_tokens: Annotated[int, within("max_tokens")]
    stop_sequences: Texts | None = None
    top_k: TopK | None = None
    metadata: Annotated[dict[str, Any] | None, Field(description="is taken, and changes nothing")] = None
    session_id: SessionName | None = None


class CountAnswer(Body):
    input_tokens: int


class TextBlock(Tagged):
    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(Tagged):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: Annotated[str, Field(description="empty")]


class ToolUseBlock(Tagged):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Body):
    input_tokens: Annotated[int, Field(description="of the prompt, without those that were cached")]
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: Annotated[int, Field(description="taken from the prefix cache")]
    carrel: Annotated[CarrelUsage | None, Field(description="as of a chat's usage")] = None


class MessageReason(Body):
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None


class MessageAnswer(Tagged, MessageReason):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    usage: MessageUsage


class MessageStart(Tagged):
    type: Literal["message_start"] = "message_start"
    message: MessageAnswer


class BlockStart(Tagged):
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: AnswerBlock


class TextPiece(Tagged):
    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingPiece(Tagged):
    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class InputPiece(Tagged):
    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


Piece = TextPiece | ThinkingPiece | InputPiece


class BlockDelta(Tagged):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: Piece


class BlockStop(Tagged):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageDelta(Tagged):
    type: Literal["message_delta"] = "message_delta"
    delta: MessageReason
    usage: MessageUsage


class MessageStop(Tagged):
    type: Literal["message_stop"] = "message_stop"


class MessageErrorTold(Tagged):
    """`param` and `code` are our own."""

    type: str
    message: str
    param: str | None = None
    code: str | None = None


class MessageErrorAnswer(Tagged):
    type: Literal["error"] = "error"
    error: MessageErrorTold


EVENTS: tuple[type[Tagged], ...] = (
    MessageStart,
    BlockStart,
    BlockDelta,
    BlockStop,
    MessageDelta,
    MessageStop,
    MessageErrorAnswer,
)
