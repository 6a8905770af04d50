"""Routes of text: each reads a body, calls the service and writes the answer."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest
from gateway.exchange import Generation
from gateway.rest.answer import VALUE_CHARS, AnswerWriter, ChoiceFormat
from gateway.rest.answers import (
    ChatAnswer,
    CompletionAnswer,
    DetokenizedAnswer,
    ModelAnswer,
    ModelListAnswer,
    TokenizedAnswer,
)
from gateway.rest.body import B, read_asked, read_body
from gateway.rest.converters import read_chat, read_completion, read_tokenize_chat
from gateway.rest.documentation import Operation
from gateway.rest.formats import ChatFormat, CompletionFormat
from gateway.rest.long_json import LongJSONResponse
from gateway.rest.reply import reply
from gateway.rest.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    StreamOptions,
    TokenizeBody,
)
from gateway.service import ChatService


class Endpoints:
    """The handlers, as methods over one service."""

    def __init__(self, config: GatewayConfig, service: ChatService) -> None:
        self._config = config
        self._service = service
        self._created = int(time.time())

    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation("GET", "/v1/models", self.models, answer=ModelListAnswer),
            # a hub id holds a slash
            Operation("GET", "/v1/models/{model_id:path}", self.model, answer=ModelAnswer),
            Operation("POST", "/v1/chat/completions", self.chat, ChatBody, ChatAnswer, streams=True),
            Operation(
                "POST", "/v1/completions", self.completion, CompletionBody, CompletionAnswer, streams=True
            ),
            Operation("POST", "/tokenize", self.tokenize, TokenizeBody, TokenizedAnswer),
            Operation("POST", "/detokenize", self.detokenize, DetokenizeBody, DetokenizedAnswer),
        )

    async def chat(self, request: Request) -> Response:
        """Continue a chat; with `stream` as server-sent events."""
        with self._service.metrics.counting_refusals():
            body = await read_asked(request, ChatBody, self._service.bodies)
            asked = read_chat(body, request.state.request_id, request.state.caller)
            generation = self._service.chat(asked)
        written = ChatFormat(bool(body.logprobs), body.prompt_logprobs)
        return await self._answer(request, body, generation, written)

    async def completion(self, request: Request) -> Response:
        """Continue one or several prompts; with `stream` as server-sent events."""
        with self._service.metrics.counting_refusals():
            body = await read_asked(request, CompletionBody, self._service.bodies)
            asked = read_completion(body, request.state.request_id, request.state.caller)
            generation = self._service.completion(asked)
        written = CompletionFormat(body.logprobs, body.prompt_logprobs)
        return await self._answer(request, body, generation, written)

    async def models(self, request: Request) -> Response:
        """The model that is served, by each of its names."""
        cards = [await self._model_card(name) for name in self._service.model_names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """One model, by its name."""
        model_id = str(request.path_params["model_id"])
        self._service.check_model(model_id)
        return JSONResponse(await self._model_card(model_id))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a `prompt`, or of `messages` behind the chat template."""
        body = await self._body(request, TokenizeBody)
        self._service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("Give either prompt or messages.", "prompt")
        caller = request.state.caller
        if body.prompt is not None:
            adds_special = body.add_special_tokens is not False
            tokens = await self._service.tokenize_text(body.prompt, adds_special, caller)
        else:
            tokens = await self._service.tokenize_chat(read_tokenize_chat(body), caller)
        info = await self._service.status.info()
        told = {"tokens": tokens, "count": len(tokens), "max_model_len": info.max_model_len}
        if body.return_token_strs:
            told["token_strs"] = await self._service.token_names(tokens, caller)
        size = len(tokens) * VALUE_CHARS
        return await self._service.work.answer(caller, size, LongJSONResponse, told)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, without special tokens."""
        body = await self._body(request, DetokenizeBody)
        self._service.check_model(body.model)
        return JSONResponse({"prompt": await self._service.detokenize(body.tokens, request.state.caller)})

    async def _body(self, request: Request, kind: type[B]) -> B:
        return await read_body(request, kind, self._service.bodies)

    async def _model_card(self, name: str) -> dict[str, Any]:
        info = await self._service.status.info()
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "carrel",
            "max_model_len": info.max_model_len,
            "carrel": {
                "policies": list(info.policies),
                "policy": info.default_policy,
                "budget": info.default_budget.share or info.default_budget.tokens or None,
            },
        }

    async def _answer(
        self, request: Request, body: GenerationBody, generation: Generation, choice_format: ChoiceFormat
    ) -> Response:
        options = body.stream_options or StreamOptions()
        work = self._service.work
        returns_ids = bool(body.return_token_ids)
        writer = AnswerWriter(generation, choice_format, options, work.of(request.state.caller), returns_ids)
        return await reply(request, generation, writer, bool(body.stream), self._config, work)
