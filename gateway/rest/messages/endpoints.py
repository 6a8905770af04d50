"""`/v1/messages`: a chat in Anthropic's words."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.config import GatewayConfig
from gateway.exchange import GenerationOptions
from gateway.rest.body import read_asked, read_body
from gateway.rest.documentation import Operation
from gateway.rest.messages.converters import read_message_request, read_prompt
from gateway.rest.messages.schemas import CountAnswer, CountBody, MessageAnswer, MessagesBody
from gateway.rest.messages.writer import MessageWriter
from gateway.rest.reply import reply
from gateway.service import ChatService


class MessagesEndpoints:
    """The handlers, as methods over one service."""

    def __init__(self, config: GatewayConfig, service: ChatService) -> None:
        self._config = config
        self._service = service

    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation("POST", "/v1/messages", self.create, MessagesBody, MessageAnswer, streams=True),
            Operation("POST", "/v1/messages/count_tokens", self.count, CountBody, CountAnswer),
        )

    async def create(self, request: Request) -> Response:
        """Continue a chat in Anthropic's words; with `stream` as its server-sent events."""
        with self._service.metrics.counting_refusals():
            body = await read_asked(request, MessagesBody, self._service.bodies)
            asked = read_message_request(body, request.state.request_id, request.state.caller)
            generation = self._service.chat(asked)
        return await reply(
            request,
            generation,
            MessageWriter(generation),
            bool(body.stream),
            self._config,
            self._service.work,
        )

    async def count(self, request: Request) -> Response:
        """How many tokens a prompt of `/v1/messages` has."""
        body = await read_body(request, CountBody, self._service.bodies)
        self._service.check_model(body.model)
        prompt = read_prompt(body, GenerationOptions(body.model))
        tokens = await self._service.tokenize_chat(prompt, request.state.caller)
        return JSONResponse({"input_tokens": len(tokens)})
