"""The Chat service: converts, calls the service, converts back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from carrel.process.request_context import RequestContext, working_for
from carrel.process.trace_context import trace_of_call
from gateway.auth import KeyRing
from gateway.errors import ServiceError
from gateway.exchange import public_id
from gateway.rest.errors import INTERNAL
from gateway.rpc.converters import ChatEvents, read_chat
from gateway.rpc.messages import abort, error_event, shown_key
from gateway.service import ChatService
from gateway.v1 import chat_pb2, chat_pb2_grpc

UNREAD = "The answer was not read in time."

log = logging.getLogger(__name__)


class ChatServicer(chat_pb2_grpc.ChatServicer):
    """An error before the first event is a status, a later one an Error event. A cancelled call frees the worker,
    and so does a client that takes no event for `write_timeout_s`."""

    def __init__(self, service: ChatService, keys: KeyRing, write_timeout_s: float) -> None:
        self._service = service
        self._keys = keys
        self._write_timeout_s = write_timeout_s

    async def Complete(self, request: chat_pb2.ChatRequest, context: grpc.aio.ServicerContext) -> None:
        # so that the answer's is that of the log
        request.request_id = public_id(request.request_id)
        trace = trace_of_call(context.invocation_metadata())
        with working_for(RequestContext(request.request_id, trace)):
            await self._complete(request, context)

    async def _complete(self, request: chat_pb2.ChatRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            async with aclosing(self._events(request, context)) as events:
                async for event in events:
                    async with asyncio.timeout(self._write_timeout_s):
                        await context.write(event)
        except TimeoutError:
            log.info("a client took nothing of its answer for %g s", self._write_timeout_s)
            # behind what it has not read: the call itself ends when it reads, when it leaves, or with its connection
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, UNREAD)

    async def _events(
        self, request: chat_pb2.ChatRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[chat_pb2.ChatEvent, None]:
        has_begun = False
        try:
            # Calls without a valid key do not come this far.
            caller = self._keys.caller(shown_key(context.invocation_metadata())) or b""
            with self._service.metrics.counting_refusals():
                generation = self._service.chat(read_chat(request, caller))
            events = ChatEvents(generation.request_id, request.include_progress)
            async with aclosing(generation.events) as stream:
                async for event in stream:
                    if (message := events.message(event)) is not None:
                        has_begun = True
                        yield message
        except ServiceError as error:
            if not has_begun:
                await abort(context, error)
            yield events.error(error_event(error))
        except Exception:
            # gRPC would send the text of the exception
            log.exception("a chat call failed")
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL)

    async def ListModels(
        self, request: chat_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> chat_pb2.ListModelsResponse:
        try:
            info = await self._service.status.info()
        except ServiceError as error:
            await abort(context, error)
            raise
        names, longest = self._service.model_names, info.max_model_len
        models = [chat_pb2.Model(id=name, max_model_len=longest) for name in names]
        return chat_pb2.ListModelsResponse(models=models)
