"""`/v1/messages`: a chat in Anthropic's words."""

from __future__ import annotations

from fastapi import Request, Response

from gateway.exchange import GenerationOptions
from gateway.rest.bounded import AnswerRoute, BoundedRouter
from gateway.rest.dependencies import ERRORS, KEY, STREAM, Caller, RequestId, Service
from gateway.rest.messages.converters import read_message_request, read_prompt
from gateway.rest.messages.schemas import CountAnswer, CountBody, MessageAnswer, MessagesBody
from gateway.rest.messages.writer import MessageWriter
from gateway.rest.reply import reply

answers = BoundedRouter(AnswerRoute, dependencies=KEY, responses={**ERRORS, **STREAM})
router = BoundedRouter(dependencies=KEY, responses=ERRORS)


@answers.post("/v1/messages", response_model=MessageAnswer)
async def create_message(
    request: Request, body: MessagesBody, caller: Caller, request_id: RequestId, service: Service
) -> Response:
    """Continue a chat in Anthropic's words; with `stream` as its server-sent events."""
    with service.metrics.counting_refusals():
        generation = service.chat(read_message_request(body, request_id, caller))
    return await reply(request, generation, MessageWriter(generation), bool(body.stream))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, caller: Caller, service: Service) -> CountAnswer:
    """How many tokens a prompt of `/v1/messages` has."""
    service.check_model(body.model)
    prompt = read_prompt(body, GenerationOptions(body.model))
    return CountAnswer(input_tokens=len(await service.tokenize_chat(prompt, caller)))
