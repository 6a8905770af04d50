"""The GPUWorker service: converts, calls the engine, converts back."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import operator
from collections.abc import Callable
from typing import TypeVar

import grpc

from carrel.process.fair_turns import FairTurns
from carrel.process.request_context import RequestContext, working_for
from carrel.process.trace_context import trace_of_call
from carrel.process.tracing import Span
from gpu_worker.errors import StoreUnavailable
from gpu_worker.grammar import Grammars
from gpu_worker.records import (
    AttentionEvent,
    CompleteEvent,
    ErrorEvent,
    GenerationRequest,
    ProgressEvent,
    PromptEvent,
    TokenEvent,
)
from gpu_worker.service import converters
from gpu_worker.service.engine_thread import EngineThread
from gpu_worker.service.event_stream import MAX_PENDING_EVENTS, EventStream
from gpu_worker.store.sessions import Sessions
from gpu_worker.store.traces import Traces, tell_phases
from gpu_worker.v1 import gpu_worker_pb2, gpu_worker_pb2_grpc

Result = TypeVar("Result")

# of each request, one line when it ends
ENDED = "%s: %s after %d tokens to %d, %d of them cached; queue %.0f ms, prefill %.0f ms, index %.0f ms, decode %.0f ms"
TOLD = operator.attrgetter(
    *(
        "completion_tokens",
        "prompt_tokens",
        "cached_tokens",
        "queue_ms",
        "prefill_ms",
        "index_wait_ms",
        "decode_ms",
    )
)

logger = logging.getLogger(__name__)

# Between two messages of a scored prompt. The engine's thread releases Python's lock at each of a step's hundreds of
# operations, and would wait for it as often: while 100,000 tokens were sent without a pause one step took all of that
# time.
PROMPT_PAUSE_SECONDS = 0.004
# a caller waits a second at most, the way to here included
STORE_SECONDS = 0.6


class GPUWorkerServicer(gpu_worker_pb2_grpc.GPUWorkerServicer):
    """Raises worker errors; BoundaryInterceptor makes them statuses."""

    def __init__(
        self,
        engine: EngineThread,
        sessions: Sessions,
        grammars: Grammars,
        traces: Traces,
        max_pending: int = MAX_PENDING_EVENTS,
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._grammars = grammars
        self._traces = traces
        self._max_pending = max_pending
        # Of scored prompts one message is made at a time, for all callers together.
        self._telling = asyncio.Lock()
        self._compiling = FairTurns(1)

    async def Generate(
        self, request: gpu_worker_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        converters.check_edition(request)
        generation = converters.read_request(request, self._engine.info)
        request_id = generation.request_id
        parent = trace_of_call(context.invocation_metadata())
        with (
            self._traces.running(request_id, parent) as span,
            working_for(RequestContext(request_id, span.trace)),
        ):
            # Tells the caller that the request is taken: a grammar, and the first event, may take long.
            await context.send_initial_metadata(())
            if (grammar := converters.read_grammar(request)) is not None:
                # one that is refused may take seconds: each caller waits for one of every other
                async with self._compiling.turn(request.prefix_salt, 1):
                    constraint = await asyncio.wrap_future(self._grammars.compile(grammar))
                generation = dataclasses.replace(generation, constraint=constraint)
            await self._stream(generation, span, context)

    async def _stream(
        self, generation: GenerationRequest, span: Span, context: grpc.aio.ServicerContext
    ) -> None:
        request_id = generation.request_id
        stream = EventStream(
            asyncio.get_running_loop(), lambda: self._engine.abort(request_id), self._max_pending
        )
        self._engine.submit(generation, stream.put)
        has_ended = False
        try:
            async for event in stream:
                match event:
                    case TokenEvent():
                        await context.write(converters.write_token(event))
                    case PromptEvent():
                        await self._tell_prompt(event, context)
                    case ProgressEvent():
                        await context.write(converters.write_progress(event))
                    case AttentionEvent():
                        await context.write(converters.write_attention(event))
                    case CompleteEvent(reason, usage):
                        has_ended = True
                        logger.info(ENDED, request_id, reason.value, *TOLD(usage))
                        tell_phases(span, usage)
                        await context.write(converters.write_complete(event))
                    case ErrorEvent():
                        has_ended = True
                        logger.info("%s: %s", request_id, type(event.error).__name__)
                        raise event.error
        finally:
            # also reached by a cancelled call or a broken connection
            stream.close()
            if not has_ended:
                self._engine.abort(request_id)

    async def _tell_prompt(self, event: PromptEvent, context: grpc.aio.ServicerContext) -> None:
        messages, has_more = converters.write_prompt(event), True
        while has_more:
            async with self._telling:
                if (message := next(messages, None)) is None:
                    return
                await context.write(message)
                if has_more := len(message.prompt.tokens) == converters.PROMPT_TOKENS:
                    await asyncio.sleep(PROMPT_PAUSE_SECONDS)

    async def Abort(
        self, request: gpu_worker_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> gpu_worker_pb2.AbortResponse:
        self._engine.abort(converters.read_request_id(request.request_id))
        return gpu_worker_pb2.AbortResponse()

    async def GetInfo(
        self, request: gpu_worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> gpu_worker_pb2.GetInfoResponse:
        return converters.write_info(self._engine.info)

    async def Stats(
        self, request: gpu_worker_pb2.StatsRequest, context: grpc.aio.ServicerContext
    ) -> gpu_worker_pb2.StatsResponse:
        return converters.write_stats(self._engine.stats())

    async def StoreStats(
        self, request: gpu_worker_pb2.StoreStatsRequest, context: grpc.aio.ServicerContext
    ) -> gpu_worker_pb2.StoreStatsResponse:
        return converters.write_store_stats(await _in_time(self._sessions.store_stats))

    async def ListSessions(
        self, request: gpu_worker_pb2.ListSessionsRequest, context: grpc.aio.ServicerContext
    ) -> gpu_worker_pb2.ListSessionsResponse:
        cards = await _in_time(lambda: self._sessions.list(request.prefix_salt, request.session_id))
        return gpu_worker_pb2.ListSessionsResponse(
            sessions=map(converters.write_session, cards), slab_tokens=self._sessions.slab_tokens
        )

    async def PinSession(
        self, request: gpu_worker_pb2.PinSessionRequest, context: grpc.aio.ServicerContext
    ) -> gpu_worker_pb2.PinSessionResponse:
        salt, session_id = request.prefix_salt, request.session_id
        seconds = converters.read_seconds(request.seconds)
        found = await _in_time(lambda: self._sessions.pin(salt, session_id, request.pinned, seconds))
        return gpu_worker_pb2.PinSessionResponse(found=found)

    async def DropSession(
        self, request: gpu_worker_pb2.DropSessionRequest, context: grpc.aio.ServicerContext
    ) -> gpu_worker_pb2.DropSessionResponse:
        found = await _in_time(lambda: self._sessions.drop(request.prefix_salt, request.session_id))
        return gpu_worker_pb2.DropSessionResponse(found=found)


async def _in_time(ask: Callable[[], Result]) -> Result:
    """Return the store's answer, awaited in a thread of its own while the engine works. Raises StoreUnavailable in less
    than a second."""
    try:
        async with asyncio.timeout(STORE_SECONDS):
            return await asyncio.to_thread(ask)
    except TimeoutError as error:
        raise StoreUnavailable("the KV store does not answer") from error
