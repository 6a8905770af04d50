"""`/v1/responses`: a chat whose turns the gateway keeps."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.config import GatewayConfig
from gateway.errors import ServiceError
from gateway.exchange import Message
from gateway.rest.body import read_asked
from gateway.rest.documentation import Operation
from gateway.rest.reply import reply
from gateway.rest.responses.converters import read_response_request
from gateway.rest.responses.input import read_input
from gateway.rest.responses.schemas import ResponseAnswer, ResponseDroppedAnswer, ResponsesBody
from gateway.rest.responses.writer import ResponseWriter
from gateway.service import ChatService
from gateway.turns import Turn, Turns

ONE = "/v1/responses/{response_id}"

log = logging.getLogger(__name__)


class ResponsesEndpoints:
    """The handlers, as methods over one service, and what they keep."""

    def __init__(self, config: GatewayConfig, service: ChatService) -> None:
        self._config = config
        self._service = service
        self._turns = Turns()

    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation("POST", "/v1/responses", self.create, ResponsesBody, ResponseAnswer, streams=True),
            Operation("GET", ONE, self.get, answer=ResponseAnswer),
            Operation("DELETE", ONE, self.drop, answer=ResponseDroppedAnswer),
        )

    async def create(self, request: Request) -> Response:
        """Answer an input, and go on from an earlier response if it names one; with `stream` as server-sent events."""
        caller, response_id = request.state.caller, f"resp_{uuid.uuid4().hex}"
        with self._service.metrics.counting_refusals():
            body = await read_asked(request, ResponsesBody, self._service.bodies)
            is_kept = body.store is not False
            before: tuple[Message, ...] = ()
            # the turns of a conversation are one session of the KV store
            session_id = response_id if is_kept else ""
            if body.previous_response_id is not None:
                before = self._turns.messages(caller, body.previous_response_id)
                session_id = self._turns.get(caller, body.previous_response_id).session_id
            asked = read_response_request(body, before, session_id, request.state.request_id, caller)
            generation = self._service.chat(asked)

        def done(response: dict[str, Any], message: Message) -> None:
            if is_kept:
                said = (*read_input(body.input), message)
                told = bytes(JSONResponse(response).body)
                self._turns.add(caller, Turn(response_id, body.previous_response_id, session_id, said, told))

        writer = ResponseWriter(_head(body, response_id, generation.model), done)
        return await reply(request, generation, writer, bool(body.stream), self._config, self._service.work)

    async def get(self, request: Request) -> Response:
        """A response that is kept."""
        turn = self._turns.get(request.state.caller, request.path_params["response_id"])
        return Response(turn.answer, media_type=JSONResponse.media_type)

    async def drop(self, request: Request) -> Response:
        """Forget a response; with the last of a conversation also what the KV store holds of it."""
        caller, response_id = request.state.caller, request.path_params["response_id"]
        turn = self._turns.get(caller, response_id)
        if self._turns.remove(caller, response_id):
            try:
                await self._service.sessions.drop(caller, turn.session_id)
            except ServiceError as error:
                # not held, or no longer, or the store is away and forgets it in time
                log.debug("session %s was not dropped: %s", turn.session_id, error)
        return JSONResponse(ResponseDroppedAnswer(id=response_id).model_dump())


def _head(body: ResponsesBody, response_id: str, model: str) -> dict[str, Any]:
    """What of the object is known before it is answered."""
    told = body.model_dump(include={"tools", "tool_choice"}, exclude_none=True)
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": _format(body)},
        "tool_choice": told.get("tool_choice", "auto"),
        "tools": told.get("tools", []),
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _format(body: ResponsesBody) -> dict[str, Any]:
    asked = body.text.format if body.text is not None else None
    return {"type": "text"} if asked is None else asked.model_dump(by_alias=True, exclude_none=True)
