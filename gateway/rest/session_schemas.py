"""Bodies and answers of `/v1/sessions`: a session of the caller, warmed, pinned or dropped."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from carrel.process.request_limits import MAX_PIN_SECONDS
from gateway.exchange import Scalar
from gateway.rest.fields import OneByOne, PromptTokenIds, Refused
from gateway.rest.schemas import Body, Messages, WorkBody


class SessionBody(WorkBody):
    """A change of a session: warm it with a text, token ids or messages, pin or unpin it, or first the one and then
    the other."""

    prompt: Annotated[str | PromptTokenIds | None, Field(description="as of a completion")] = None
    messages: Annotated[Messages | None, Field(description="as of a chat")] = None
    chat_template_kwargs: Annotated[dict[str, Scalar], OneByOne] | None = None
    tools: Refused = None
    pinned: Annotated[bool | None, Field(description="evict it after all that are not pinned")] = None
    ttl_seconds: Annotated[
        int | None,
        Field(ge=1, le=MAX_PIN_SECONDS, description="how long it stays pinned; null: until unpinned"),
    ] = None


class SessionAnswer(Body):
    """A session of the caller. Times are Unix times in seconds."""

    id: str
    object: Literal["session"] = "session"
    model: str
    tokens: Annotated[int, Field(description="of its last prompt that it holds, in whole slabs")]
    bytes: Annotated[int, Field(description="of the arena; what other sessions hold too is counted in each")]
    created_at: int
    last_used_at: Annotated[int, Field(description="when a prompt of it was computed last")]
    pinned: bool
    expires_at: Annotated[int | None, Field(description="when the pin ends; null: not by itself")]


class SessionListAnswer(Body):
    object: Literal["list"] = "list"
    data: Annotated[list[SessionAnswer], Field(description="the one that was used last first")]


class WarmedAnswer(Body):
    prompt_tokens: int
    cached_tokens: Annotated[int, Field(description="of them, that were known before")]
    seconds: float


class SessionChangedAnswer(SessionAnswer):
    warmed: Annotated[
        WarmedAnswer | None, Field(description="what warming took; null where nothing was warmed")
    ]


class SessionDroppedAnswer(Body):
    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True
