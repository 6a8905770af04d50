"""The worker as the gateway sees it: one Protocol, and the gRPC client behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from carrel.process.version import Edition, edition_of
from gateway.errors import (
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    ServiceError,
    VersionMismatch,
    WorkerUnavailable,
)
from gateway.records import (
    FinishReason,
    WorkerComplete,
    WorkerEvent,
    WorkerInfo,
    WorkerProgress,
    WorkerRequest,
    WorkerStats,
    WorkerToken,
    WorkerUsage,
)
from gpu_worker.v1 import gpu_worker_pb2 as pb
from gpu_worker.v1 import gpu_worker_pb2_grpc as pb_grpc

CONTROL_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 1.0
PARAM_KEY = "carrel-param"
CODE_KEY = "carrel-code"

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORT: FinishReason.ABORT,
}


def own_edition() -> Edition:
    """Of this gateway, which works only with a worker of the same."""
    return edition_of(pb.DESCRIPTOR.serialized_pb)


class WorkerClient(Protocol):
    """Token ids in, token ids out. Every method raises ServiceErrors only."""

    def generate(self, request: WorkerRequest) -> AsyncGenerator[WorkerEvent, None]:
        """The events of one request, a WorkerComplete last. Closing the iterator frees the worker's room."""

    async def abort(self, request_id: str) -> None:
        """End a request, which then still sends its WorkerComplete."""

    async def info(self) -> WorkerInfo:
        """What it is. Raises VersionMismatch for a worker of another version."""

    async def stats(self) -> WorkerStats: ...

    async def is_serving(self) -> bool:
        """Whether the worker's health says SERVING. Raises WorkerUnavailable when it does not answer."""


class GRPCWorkerClient:
    """One channel to one worker; must be built inside the event loop, and closed."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            target,
            options=[
                # the worker is on this box or next to it: no proxy, and a quick look after a restart
                ("grpc.enable_http_proxy", 0),
                ("grpc.initial_reconnect_backoff_ms", 200),
                ("grpc.max_reconnect_backoff_ms", 2000),
            ],
        )
        self._worker = pb_grpc.GPUWorkerStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def generate(self, request: WorkerRequest) -> AsyncGenerator[WorkerEvent, None]:
        call = self._worker.Generate(write_request(request), timeout=request.timeout_s)
        try:
            async for response in call:
                event = read_event(response)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc, request.timeout_s) from exc
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> None:
        async with _translated(CONTROL_TIMEOUT_S):
            await self._worker.Abort(pb.AbortRequest(request_id=request_id), timeout=CONTROL_TIMEOUT_S)

    async def info(self) -> WorkerInfo:
        async with _translated(CONTROL_TIMEOUT_S):
            info = await self._worker.GetInfo(pb.GetInfoRequest(), timeout=CONTROL_TIMEOUT_S)
        other = Edition(info.version, info.messages)
        if reason := own_edition().refusal("The gateway", "the model worker", other):
            raise VersionMismatch(f"{reason}.")
        return WorkerInfo(
            version=info.version,
            model=info.model,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            policies=tuple(info.policies),
            default_policy=info.default_policy,
        )

    async def stats(self) -> WorkerStats:
        async with _translated(CONTROL_TIMEOUT_S):
            stats = await self._worker.Stats(pb.StatsRequest(), timeout=CONTROL_TIMEOUT_S)
        return WorkerStats(**{name: getattr(stats, name) for name in WorkerStats.__dataclass_fields__})

    async def is_serving(self) -> bool:
        async with _translated(HEALTH_TIMEOUT_S):
            reply = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        await self._channel.close(None)


@asynccontextmanager
async def _translated(timeout_s: float) -> AsyncGenerator[None, None]:
    """A short control call: no answer in time means that the worker is not there."""
    try:
        yield
    except grpc.aio.AioRpcError as exc:
        if exc.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            raise WorkerUnavailable("The model worker does not answer.") from exc
        raise error_of(exc, timeout_s) from exc


def write_request(request: WorkerRequest) -> pb.GenerateRequest:
    sampling, carrel = request.sampling, request.carrel
    message = pb.GenerateRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=pb.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            min_tokens=sampling.min_tokens,
            logprobs=sampling.logprobs,
            logit_bias=dict(sampling.logit_bias),
        ),
        policy=carrel.policy or "",
        prefix_salt=request.caller,
        edition=pb.Edition(version=own_edition().version, messages=own_edition().messages),
        session_id=request.session_id,
    )
    if carrel.budget is not None:
        message.budget.CopyFrom(pb.Budget(share=carrel.budget.share, tokens=carrel.budget.tokens))
    return message


def read_event(response: pb.GenerateResponse) -> WorkerEvent | None:
    """The event in a message; None for a kind that this version does not know."""
    match response.WhichOneof("event"):
        case "token":
            token = response.token
            return WorkerToken(
                token.token_id, token.logprob, tuple((top.token_id, top.logprob) for top in token.top)
            )
        case "progress":
            return WorkerProgress(response.progress.prefilled_tokens)
        case "complete":
            usage = response.complete.usage
            return WorkerComplete(
                _FINISH_REASONS.get(response.complete.finish_reason, FinishReason.ABORT),
                WorkerUsage(**{name: getattr(usage, name) for name in WorkerUsage.__dataclass_fields__}),
            )
        case _:
            return None


def error_of(exc: grpc.aio.AioRpcError, timeout_s: float) -> ServiceError:
    """The gateway's error for a call that failed."""
    trailing: dict[str, str] = dict(exc.trailing_metadata() or ())  # type: ignore[arg-type]
    return status_error(
        exc.code(), exc.details() or "", timeout_s, trailing.get(PARAM_KEY), trailing.get(CODE_KEY)
    )


def status_error(
    status: grpc.StatusCode, details: str, timeout_s: float, param: str | None = None, code: str | None = None
) -> ServiceError:
    """The one table from gRPC statuses to the gateway's errors.

    Only the text of statuses that the worker raises on purpose is passed on.
    """
    match status:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(details, param, code)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(details)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return VersionMismatch(details)
        case grpc.StatusCode.UNAVAILABLE:
            return WorkerUnavailable()
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return RequestTimeout(timeout_s)
        case grpc.StatusCode.ABORTED:
            return GenerationFailed(details)
        case _:
            return GenerationFailed()
