"""Bodies of `/v1/messages` as Anthropic's clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from carrel.process.request_limits import MAX_SESSION_CHARS, MAX_UINT32
from gateway.grammars import JsonSchema
from gateway.rest.fields import FunctionName, Hidden, Refused, Texts, refused, within
from gateway.rest.schemas import AnswerBody, Body
from gateway.tool_calls.checks import MAX_TOOLS


class Block(Body):
    """A block of type text, thinking, tool_use (an assistant's call) or tool_result (its answer)."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: Annotated[str | None, Field(description="of a call")] = None
    name: FunctionName | None = None
    input: Annotated[dict[str, Any] | None, Field(description="of a call")] = None
    tool_use_id: Annotated[str | None, Field(description="the call that this answers")] = None
    content: str | Annotated[list[Block], Field(fail_fast=True)] | None = None


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
    """Either way the model thinks as its chat template lets it: no budget of it can be held."""

    type: Literal["disabled", "adaptive"]
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
    stream: bool | None = None
    temperature: Annotated[float, within("temperature")] | None = None
    top_p: Annotated[float, within("top_p")] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_UINT32)] | None = None
    metadata: Annotated[dict[str, Any] | None, Field(description="is taken, and changes nothing")] = None
    session_id: Annotated[str, Field(min_length=1, max_length=MAX_SESSION_CHARS)] | None = None


class TextBlock(Body):
    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(Body):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: Annotated[str, Field(description="empty")] = ""


class ToolUseBlock(Body):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Body):
    input_tokens: Annotated[int, Field(description="of the prompt, without those that were cached")]
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: Annotated[int, Field(description="taken from the prefix cache")]
    carrel: Annotated[dict[str, Any] | None, Field(description="as of a chat's usage")] = None


class MessageAnswer(Body):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class CountAnswer(Body):
    input_tokens: int
