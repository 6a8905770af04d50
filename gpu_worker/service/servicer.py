"""The GPUWorker service: converts, calls the engine, converts back."""

from __future__ import annotations

import asyncio

import grpc

from gpu_worker.records import CompleteEvent, ErrorEvent, ProgressEvent, TokenEvent
from gpu_worker.service import converters
from gpu_worker.service.engine_thread import EngineThread
from gpu_worker.service.event_stream import MAX_PENDING_EVENTS, EventStream
from gpu_worker.v1 import gpu_worker_pb2, gpu_worker_pb2_grpc


class GPUWorkerServicer(gpu_worker_pb2_grpc.GPUWorkerServicer):
    """Raises worker errors; BoundaryInterceptor makes them statuses."""

    def __init__(self, engine: EngineThread, max_pending: int = MAX_PENDING_EVENTS) -> None:
        self._engine = engine
        self._max_pending = max_pending

    async def Generate(
        self, request: gpu_worker_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        converters.check_edition(request)
        generation = converters.read_request(request, self._engine.info)
        request_id = generation.request_id
        stream = EventStream(
            asyncio.get_running_loop(), lambda: self._engine.abort(request_id), self._max_pending
        )
        self._engine.submit(generation, stream.put)
        # Tells the caller that the request was taken; its first event may take long.
        await context.send_initial_metadata(())
        has_ended = False
        try:
            async for event in stream:
                match event:
                    case TokenEvent():
                        await context.write(converters.write_token(event))
                    case ProgressEvent():
                        await context.write(converters.write_progress(event))
                    case CompleteEvent():
                        has_ended = True
                        await context.write(converters.write_complete(event))
                    case ErrorEvent():
                        has_ended = True
                        raise event.error
        finally:
            # also reached by a cancelled call or a broken connection
            stream.close()
            if not has_ended:
                self._engine.abort(request_id)

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
