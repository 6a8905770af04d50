"""`/v1/sessions`: what the caller's conversations and documents hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import Request

from gateway.errors import InvalidRequest
from gateway.exchange import ChatRequest, CompletionRequest
from gateway.rest.bounded import BoundedRouter
from gateway.rest.converters import read_warming
from gateway.rest.dependencies import ERRORS, KEY, Caller, RequestId, Service, SessionId
from gateway.rest.feed import while_connected
from gateway.rest.session_schemas import (
    SessionAnswer,
    SessionBody,
    SessionChangedAnswer,
    SessionDroppedAnswer,
    SessionListAnswer,
    WarmedAnswer,
)
from gateway.service import ChatService
from gateway.sessions import Warmed
from gpu_worker.v1 import gpu_worker_pb2 as pb

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
    warming = read_warming(body, session_id, request_id, caller)
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
