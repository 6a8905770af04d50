"""`python -m benchmarks.load.paced_worker ADDRESS STEP_MS`: a worker without a model, until stdin ends.

Every request gets its tokens one at a time, STEP_MS apart, as an engine's steps would bring them; what they are is
always the same. Stdout: one line when it serves.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from gpu_worker.service.converters import own_edition
from gpu_worker.v1 import gpu_worker_pb2 as pb
from gpu_worker.v1 import gpu_worker_pb2_grpc as pb_grpc

VOCAB_SIZE = 8192
MAX_MODEL_LEN = 131072
# plain words of carrel-nano's vocabulary
FIRST_TOKEN, NUM_TOKENS = 1000, 1000


class PacedWorker(pb_grpc.GPUWorkerServicer):
    """A worker that costs a gateway no more than its messages do."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        num_tokens = request.sampling.max_tokens
        for step in range(num_tokens):
            await asyncio.sleep(self._step_s)
            yield pb.GenerateResponse(token=pb.Token(token_id=FIRST_TOKEN + step % NUM_TOKENS))
        usage = pb.Usage(
            prompt_tokens=len(request.prompt_token_ids), completion_tokens=num_tokens, policy="full"
        )
        yield pb.GenerateResponse(complete=pb.Complete(finish_reason=pb.FINISH_REASON_LENGTH, usage=usage))

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        return pb.AbortResponse()

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(
            version=own_edition().version,
            messages=own_edition().messages,
            model="paced",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            policies=("full",),
        )

    async def Stats(self, request: pb.StatsRequest, context: grpc.aio.ServicerContext) -> pb.StatsResponse:
        return pb.StatsResponse(store_reachable=True)


async def serve(address: str, step_s: float) -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 16 << 20)])
    pb_grpc.add_GPUWorkerServicer_to_server(PacedWorker(step_s), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    server.add_insecure_port(address)
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], float(sys.argv[2]) / 1000))
