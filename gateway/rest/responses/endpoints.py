"""`/v1/responses`: a chat whose turns the gateway keeps."""

from __future__ import annotations

import logging
import time
import uuid

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from gateway.errors import ServiceError
from gateway.exchange import Message
from gateway.rest.bounded import (
    ERRORS,
    KEY,
    AnswerRoute,
    BoundedRouter,
    Caller,
    KeptTurns,
    RequestId,
    Service,
    streamed,
)
from gateway.rest.options import session_of
from gateway.rest.reply import reply
from gateway.rest.responses.converters import read_input, read_response_request
from gateway.rest.responses.function_names import FunctionNames
from gateway.rest.responses.schemas import (
    EVENTS,
    ResponseAnswer,
    ResponseDroppedAnswer,
    ResponsesBody,
    TextFormat,
    TextOptions,
)
from gateway.rest.responses.writer import ResponseWriter
from gateway.rest.schemas import Sampling
from gateway.turns import Turn

ONE = "/v1/responses/{response_id}"

log = logging.getLogger(__name__)

answers = BoundedRouter(AnswerRoute, dependencies=KEY, responses=ERRORS)
router = BoundedRouter(dependencies=KEY, responses=ERRORS)


@answers.post("/v1/responses", response_model=ResponseAnswer, responses=streamed(*EVENTS))
async def create_response(
    request: Request,
    body: ResponsesBody,
    caller: Caller,
    request_id: RequestId,
    turns: KeptTurns,
    service: Service,
) -> Response:
    """Answer an input, and go on from an earlier response if it names one; with `stream` as server-sent events."""
    response_id = f"resp_{uuid.uuid4().hex}"
    with service.metrics.counting_refusals():
        is_kept = body.store is not False
        before: tuple[Message, ...] = ()
        # the turns of a conversation are one session of the KV store
        session_id = session_of(None, body.prompt_cache_key) or (response_id if is_kept else "")
        names = FunctionNames(body.tools or ())
        if body.previous_response_id is not None:
            before = turns.messages(caller, body.previous_response_id)
            session_id = turns.get(caller, body.previous_response_id).session_id
        generation = service.chat(read_response_request(body, names, before, session_id, request_id, caller))

    def done(response: ResponseAnswer, message: Message) -> None:
        if is_kept:
            said = (*read_input(body.input, names), message)
            turns.add(
                caller, Turn(response_id, body.previous_response_id, session_id, said, response.written())
            )

    writer = ResponseWriter(_begun(body, response_id, generation.model), names, done)
    return await reply(request, generation, writer, bool(body.stream))


@router.get(ONE, response_model=ResponseAnswer)
async def show_response(response_id: str, caller: Caller, turns: KeptTurns) -> Response:
    """A response that is kept."""
    return Response(turns.get(caller, response_id).answer, media_type=JSONResponse.media_type)


@router.delete(ONE)
async def drop_response(
    response_id: str, caller: Caller, turns: KeptTurns, service: Service
) -> ResponseDroppedAnswer:
    """Forget a response; with the last of a conversation also what the KV store holds of it."""
    turn = turns.get(caller, response_id)
    if turns.remove(caller, response_id):
        try:
            await service.sessions.drop(caller, turn.session_id)
        except ServiceError as error:
            # not held, or no longer, or the store is away and forgets it in time
            log.debug("session %s was not dropped: %s", turn.session_id, error)
    return ResponseDroppedAnswer(id=response_id)


def _begun(body: ResponsesBody, response_id: str, model: str) -> ResponseAnswer:
    """Return the answer before it has any output."""
    tools = body.model_dump(include={"tools"}, exclude_none=True).get("tools", [])
    asked = body.text.format if body.text is not None else None
    return ResponseAnswer(
        id=response_id,
        object="response",
        created_at=int(time.time()),
        status="in_progress",
        error=None,
        incomplete_details=None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": None, "summary": None},
        store=body.store is not False,
        text=TextOptions(format=TextFormat(type="text") if asked is None else asked),
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=tools,
        top_logprobs=body.top_logprobs,
        truncation="disabled",
        usage=None,
        user=body.user,
        **{name: getattr(body, name) for name in Sampling.model_fields},
    )
