"""Routes of text: each calls the service with what its body asks for and writes the answer."""

from __future__ import annotations

from fastapi import Request, Response

from gateway.errors import InvalidRequest
from gateway.rest.answer import VALUE_CHARS
from gateway.rest.answers import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    DetokenizedAnswer,
    ErrorAnswer,
    ModelAnswer,
    ModelListAnswer,
    ModelPolicies,
    TokenizedAnswer,
)
from gateway.rest.bounded import ERRORS, KEY, AnswerRoute, BoundedRouter, Caller, RequestId, Service, streamed
from gateway.rest.converters import read_chat, read_completion, read_tokenize_chat
from gateway.rest.errors import BodyResponse
from gateway.rest.formats import ChatWriter, CompletionWriter
from gateway.rest.reply import reply
from gateway.rest.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from gateway.service import ChatService

answers = BoundedRouter(AnswerRoute, dependencies=KEY, responses=ERRORS)
router = BoundedRouter(dependencies=KEY, responses=ERRORS)


@answers.post("/v1/chat/completions", response_model=ChatAnswer, responses=streamed(ChatChunk, ErrorAnswer))
async def chat(
    request: Request, body: ChatBody, caller: Caller, request_id: RequestId, service: Service
) -> Response:
    """Continue a chat; with `stream` as server-sent events."""
    with service.metrics.counting_refusals():
        generation = service.chat(read_chat(body, request_id, caller))
    writer = ChatWriter(generation, body, service.work.of(caller))
    return await reply(request, generation, writer, bool(body.stream))


@answers.post(
    "/v1/completions", response_model=CompletionAnswer, responses=streamed(CompletionChunk, ErrorAnswer)
)
async def completion(
    request: Request, body: CompletionBody, caller: Caller, request_id: RequestId, service: Service
) -> Response:
    """Continue one or several prompts; with `stream` as server-sent events."""
    with service.metrics.counting_refusals():
        generation = service.completion(read_completion(body, request_id, caller))
    writer = CompletionWriter(generation, body, service.work.of(caller))
    return await reply(request, generation, writer, bool(body.stream))


# servers that redirect lead a client from /v1/models/ to the list
@router.get("/v1/models/", include_in_schema=False)
@router.get("/v1/models")
async def models(request: Request, service: Service) -> ModelListAnswer:
    """The model that is served, by each of its names."""
    created = request.app.state.created
    return ModelListAnswer(data=[await _model_card(service, name, created) for name in service.model_names])


# a hub id holds a slash
@router.get("/v1/models/{model_id:path}")
async def model(request: Request, model_id: str, service: Service) -> ModelAnswer:
    """One model, by its name."""
    service.check_model(model_id)
    return await _model_card(service, model_id, request.app.state.created)


@router.post("/tokenize", response_model=TokenizedAnswer)
async def tokenize(body: TokenizeBody, caller: Caller, service: Service) -> Response:
    """Token ids of a `prompt`, or of `messages` behind the chat template."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", "prompt")
    if body.prompt is not None:
        adds_special = body.add_special_tokens is not False
        tokens = await service.tokenize_text(body.prompt, adds_special, caller)
    else:
        tokens = await service.tokenize_chat(read_tokenize_chat(body), caller)
    info = await service.status.info()
    names = {"token_strs": await service.token_names(tokens, caller)} if body.return_token_strs else {}

    def answer() -> Response:
        """Belongs in a thread: there may be a million."""
        found = TokenizedAnswer(
            tokens=list(tokens), count=len(tokens), max_model_len=info.max_model_len, **names
        )
        return BodyResponse(found)

    return await service.work.answer(caller, len(tokens) * VALUE_CHARS, answer)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, caller: Caller, service: Service) -> DetokenizedAnswer:
    """The text of token ids, without special tokens."""
    service.check_model(body.model)
    return DetokenizedAnswer(prompt=await service.detokenize(body.tokens, caller))


async def _model_card(service: ChatService, name: str, created: int) -> ModelAnswer:
    info = await service.status.info()
    return ModelAnswer(
        id=name,
        created=created,
        owned_by="carrel",
        max_model_len=info.max_model_len,
        carrel=ModelPolicies(
            policies=list(info.policies),
            policy=info.default_policy,
            budget=info.default_budget.share or info.default_budget.tokens or None,
        ),
    )
