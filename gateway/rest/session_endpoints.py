"""`/v1/sessions`: what the caller's conversations and documents hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.errors import InvalidRequest
from gateway.exchange import ChatRequest, CompletionRequest
from gateway.rest.body import read_body
from gateway.rest.converters import read_warming
from gateway.rest.documentation import Operation
from gateway.rest.feed import while_connected
from gateway.rest.schemas import Body
from gateway.rest.session_schemas import (
    SessionAnswer,
    SessionBody,
    SessionChangedAnswer,
    SessionDroppedAnswer,
    SessionListAnswer,
    WarmedAnswer,
)
from gateway.service import ChatService
from gateway.sessions import Warmed, check_session_id
from gpu_worker.v1 import gpu_worker_pb2 as pb

# an id may hold a slash
ONE = "/v1/sessions/{session_id:path}"


class SessionEndpoints:
    """The handlers, as methods over one service."""

    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._sessions = service.sessions

    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation("GET", "/v1/sessions", self.list, answer=SessionListAnswer),
            Operation("GET", ONE, self.get, answer=SessionAnswer),
            Operation("POST", ONE, self.change, SessionBody, SessionChangedAnswer),
            Operation("DELETE", ONE, self.drop, answer=SessionDroppedAnswer),
        )

    async def list(self, request: Request) -> Response:
        """The caller's sessions: what of their last prompts the KV store holds."""
        sessions = await self._sessions.list(request.state.caller)
        return _json(SessionListAnswer(data=[SessionAnswer(**self._card(each)) for each in sessions]))

    async def get(self, request: Request) -> Response:
        """One session of the caller."""
        session = await self._sessions.get(request.state.caller, _session_id(request))
        return _json(SessionAnswer(**self._card(session)))

    async def change(self, request: Request) -> Response:
        """Warm a session, which need not exist, by computing a text, token ids or messages; pin or unpin it."""
        body = await read_body(request, SessionBody, self._service.bodies)
        session_id, caller = _session_id(request), request.state.caller
        self._service.check_model(body.model)
        if body.ttl_seconds is not None and not body.pinned:
            raise InvalidRequest("ttl_seconds needs pinned to be true.", "ttl_seconds")
        warming = read_warming(body, session_id, request.state.request_id, caller)
        if warming is None and body.pinned is None:
            raise InvalidRequest("Give prompt or messages to warm the session, or pinned.", "prompt")
        warmed = None if warming is None else await self._warm(request, warming, session_id)
        if body.pinned is not None:
            await self._sessions.pin(caller, session_id, body.pinned, float(body.ttl_seconds or 0))
        card = self._card(await self._sessions.get(caller, session_id))
        cost = None if warmed is None else WarmedAnswer(**asdict(warmed))
        return _json(SessionChangedAnswer(**card, warmed=cost))

    async def drop(self, request: Request) -> Response:
        """Forget a session and give back what it holds; requests that use it go on."""
        session_id = _session_id(request)
        await self._sessions.drop(request.state.caller, session_id)
        return _json(SessionDroppedAnswer(id=session_id))

    async def _warm(
        self, request: Request, warming: ChatRequest | CompletionRequest, session_id: str
    ) -> Warmed:
        match warming:
            case ChatRequest():
                generation = self._service.chat(warming)
            case CompletionRequest():
                generation = self._service.completion(warming)
        work = self._sessions.warm(generation.events, request.state.caller, session_id)
        return await while_connected(request.receive, work)

    def _card(self, session: pb.Session) -> dict[str, Any]:
        return {
            "id": session.session_id,
            "model": self._service.model_name,
            "tokens": session.tokens,
            "bytes": session.bytes,
            "created_at": int(session.created_at),
            "last_used_at": int(session.last_used_at),
            "pinned": session.pinned,
            "expires_at": int(session.expires_at) or None,
        }


def _session_id(request: Request) -> str:
    return check_session_id(str(request.path_params["session_id"]))


def _json(answer: Body) -> JSONResponse:
    return JSONResponse(answer.model_dump())
