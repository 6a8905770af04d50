"""`/v1/sessions`: what the caller's conversations and documents hold in the KV store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field

from carrel.process.request_limits import MAX_PIN_SECONDS
from gateway.errors import InvalidRequest
from gateway.exchange import ChatRequest, CompletionRequest, Scalar
from gateway.rest.bounded import ERRORS, KEY, BoundedRouter, Caller, RequestId, Service, SessionId
from gateway.rest.converters import read_messages
from gateway.rest.feed import while_connected
from gateway.rest.fields import OneByOne, PromptTokenIds, Refused
from gateway.rest.options import read_options
from gateway.rest.schemas import Body, Messages, WorkBody
from gateway.service import ChatService
from gateway.sessions import Warmed
from gpu_worker.v1 import gpu_worker_pb2 as pb


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


# an id may hold a slash
ONE = "/v1/sessions/{session_id:path}"

router = BoundedRouter(dependencies=KEY, responses=ERRORS)


@router.get("/v1/sessions")
async def list_sessions(caller: Caller, service: Service) -> SessionListAnswer:
    """The caller's sessions: what of their last prompts the KV store holds."""
    sessions = await service.sessions.list(caller)
    return SessionListAnswer(data=[SessionAnswer(**_card(service, each)) for each in sessions])


@router.get(ONE)
async def show_session(session_id: SessionId, caller: Caller, service: Service) -> SessionAnswer:
    """One session of the caller."""
    return SessionAnswer(**_card(service, await service.sessions.get(caller, session_id)))


@router.post(ONE)
async def change_session(
    request: Request,
    session_id: SessionId,
    body: SessionBody,
    caller: Caller,
    request_id: RequestId,
    service: Service,
) -> SessionChangedAnswer:
    """Warm a session, which need not exist, by computing a text, token ids or messages; pin or unpin it."""
    service.check_model(body.model)
    if body.ttl_seconds is not None and not body.pinned:
        raise InvalidRequest("ttl_seconds needs pinned to be true.", "ttl_seconds")
    warming = _read_warming(body, session_id, request_id, caller)
    if warming is None and body.pinned is None:
        raise InvalidRequest("Give prompt or messages to warm the session, or pinned.", "prompt")
    warmed = None if warming is None else await _warm(request, warming, session_id, caller, service)
    if body.pinned is not None:
        await service.sessions.pin(caller, session_id, body.pinned, float(body.ttl_seconds or 0))
    card = _card(service, await service.sessions.get(caller, session_id))
    cost = None if warmed is None else WarmedAnswer(**asdict(warmed))
    return SessionChangedAnswer(**card, warmed=cost)


@router.delete(ONE)
async def drop_session(session_id: SessionId, caller: Caller, service: Service) -> SessionDroppedAnswer:
    """Forget a session and give back what it holds; requests that use it go on."""
    await service.sessions.drop(caller, session_id)
    return SessionDroppedAnswer(id=session_id)


def _read_warming(
    body: SessionBody, session_id: str, request_id: str | None, caller: bytes
) -> ChatRequest | CompletionRequest | None:
    """The request that computes what the body has for its session; None where it has nothing. Raises InvalidRequest."""
    if body.prompt is not None and body.messages is not None:
        raise InvalidRequest("Give either prompt or messages.", "prompt")
    # nothing is read of the answer
    options = read_options(body, caller, session_id, {"max_tokens": 1})
    if body.messages is not None:
        messages = read_messages(body.messages)
        return ChatRequest(messages, options, body.chat_template_kwargs or {}, request_id)
    if body.prompt is not None:
        return CompletionRequest((body.prompt,), options, request_id)
    return None


async def _warm(
    request: Request,
    warming: ChatRequest | CompletionRequest,
    session_id: str,
    caller: bytes,
    service: ChatService,
) -> Warmed:
    match warming:
        case ChatRequest():
            generation = service.chat(warming)
        case CompletionRequest():
            generation = service.completion(warming)
    work = service.sessions.warm(generation.events, caller, session_id)
    return await while_connected(request.receive, work)


def _card(service: ChatService, session: pb.Session) -> dict[str, Any]:
    return {
        "id": session.session_id,
        "model": service.model_name,
        "tokens": session.tokens,
        "bytes": session.bytes,
        "created_at": int(session.created_at),
        "last_used_at": int(session.last_used_at),
        "pinned": session.pinned,
        "expires_at": int(session.expires_at) or None,
    }
