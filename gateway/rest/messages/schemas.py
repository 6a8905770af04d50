"""Bodies of `/v1/messages` as Anthropic's clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from carrel.process.request_limits import MAX_CACHE_SALT_CHARS, MAX_SESSION_CHARS, MAX_UINT32
from gateway.rest.schemas import Body, CarrelBody, Texts, Timeout, within


class Block(Body):
    type: str
    text: str | None = None


Content = str | Annotated[list[Block], Field(fail_fast=True)]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: Content


class CountBody(Body):
    """What a prompt is made of. Others are kept, so that their reader can refuse some."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: Annotated[list[Turn], Field(fail_fast=True)]
    system: Content | None = None


class MessagesBody(CountBody):
    max_tokens: Annotated[int, within("max_tokens")]
    stop_sequences: Texts | None = None
    stream: bool | None = None
    temperature: Annotated[float, within("temperature")] | None = None
    top_p: Annotated[float, within("top_p")] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_UINT32)] | None = None
    metadata: Annotated[dict[str, Any] | None, Field(description="is taken, and changes nothing")] = None
    session_id: Annotated[str, Field(min_length=1, max_length=MAX_SESSION_CHARS)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None
    priority: Annotated[int, within("priority")] | None = None
    timeout_seconds: Timeout | None = None
    carrel: CarrelBody | None = None


class TextBlock(Body):
    type: Literal["text"] = "text"
    text: str


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
    content: list[TextBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence"] | None
    stop_sequence: str | None
    usage: MessageUsage


class CountAnswer(Body):
    input_tokens: int
