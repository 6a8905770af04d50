"""A worker that answers with a given text: a real grpc.aio server of the worker's proto."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from gateway.worker_client import own_edition
from gpu_worker.v1 import gpu_worker_pb2 as pb
from gpu_worker.v1 import gpu_worker_pb2_grpc as pb_grpc

SLAB_TOKENS = 8


@dataclass
class Script:
    """The worker's next reply, and a record of what it received."""

    reply: list[int] = field(default_factory=list)
    # gives the reply to each request, where it depends on the prompt
    answer: Callable[[pb.GenerateRequest], list[int]] | None = None
    # before this token the call fails, or hangs until it is cancelled or aborted
    fail_at: int | None = None
    fail_with: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]] = (grpc.StatusCode.INTERNAL, "x", ())
    hang_at: int | None = None
    # the alternative to every token; None: itself
    best: int | None = None
    # each further alternative is another token, and less likely by so much; 0: they are all the same
    margin: float = 0.0
    # nothing comes while it is set
    is_silent: bool = False
    # nor does it say that it took a request, or what it is, or whether it lives
    hangs: bool = False
    # it does not say that it took a request while it is set, but all else
    is_late: bool = False
    # computed and cached tokens that are told before the first token; without any: that all is computed
    progress: list[tuple[int, int]] = field(default_factory=list)
    # one is told before each token, where the request asked
    sights: list[pb.Attention] = field(default_factory=list)
    # no token comes while it is set
    is_held: bool = False
    # before each token
    token_s: float = 0.0
    store_reachable: bool = True
    # of each caller by their ids; prompts of a slab or more are held while it has room
    sessions: dict[bytes, dict[str, pb.Session]] = field(default_factory=dict)
    has_room: bool = True
    has_pinned_all: bool = False
    version: str = field(default_factory=lambda: own_edition().version)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    # of each of them
    traceparents: list[str | None] = field(default_factory=list)
    num_cancelled: int = 0
    # how often it was asked whether it lives
    num_asked: int = 0
    aborted: list[str] = field(default_factory=list)


class FakeWorker(pb_grpc.GPUWorkerServicer):
    def __init__(self, script: Callable[[], Script], vocab_size: int, max_model_len: int) -> None:
        self.script = script
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._aborts: dict[str, asyncio.Event] = {}

    async def Generate(self, request, context):
        script = self.script()
        script.requests.append(request)
        script.traceparents.append(dict(context.invocation_metadata()).get("traceparent"))
        aborted = self._aborts.setdefault(request.request_id, asyncio.Event())
        try:
            while script.hangs or script.is_late:
                await asyncio.sleep(0.01)
            await context.send_initial_metadata(())
            while script.is_silent:
                await asyncio.sleep(0.01)
            reply = script.reply if script.answer is None else script.answer(request)
            tokens = reply[: request.sampling.max_tokens]
            count = 0
            for at, token in enumerate([*tokens, None]):
                if at == script.fail_at:
                    code, details, metadata = script.fail_with
                    await context.abort(code, details, trailing_metadata=metadata)
                if at == 0:
                    for computed, cached in script.progress or [(len(request.prompt_token_ids), 0)]:
                        told = pb.Progress(computed_tokens=computed, cached_tokens=cached)
                        yield pb.GenerateResponse(progress=told)
                        if request.sampling.HasField("prompt_logprobs"):
                            yield self._scored(request)
                if request.attention and at < len(script.sights):
                    yield pb.GenerateResponse(attention=script.sights[at])
                if at == script.hang_at:
                    await aborted.wait()
                while script.is_held:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(script.token_s)
                if token is None or aborted.is_set():
                    break
                count += 1
                best = token if script.best is None else script.best
                top = [
                    pb.TokenLogprob(
                        token_id=best + (at if script.margin else 0), logprob=-0.5 - at * script.margin
                    )
                    for at in range(request.sampling.logprobs)
                ]
                yield pb.GenerateResponse(token=pb.Token(token_id=token, logprob=-0.5, top=top))
            is_cut = len(tokens) < len(reply)
            reason = pb.FINISH_REASON_LENGTH if is_cut else pb.FINISH_REASON_STOP
            reason = pb.FINISH_REASON_ABORT if aborted.is_set() else reason
            num_prompt = len(request.prompt_token_ids)
            self._hold(request)
            usage = pb.Usage(
                prompt_tokens=num_prompt, completion_tokens=count, cached_tokens=3, policy=request.policy or "full",
                budget_tokens=request.budget.tokens, context_tokens=num_prompt + count, hit_rate=0.5, bytes_moved=7,
                attended_tokens=2.5, window_tokens=1.5, offloaded_tokens=num_prompt, prefill_ms=1.25,
            )  # fmt: skip
            yield pb.GenerateResponse(complete=pb.Complete(finish_reason=reason, usage=usage))
        except (asyncio.CancelledError, GeneratorExit):
            # the latter where it is cancelled while what it said is sent
            script.num_cancelled += 1
            raise

    def _scored(self, request):
        """Its tokens from the second on, each the likelier the later, with one that is likelier."""
        tokens = [
            pb.Token(
                token_id=token,
                logprob=-1.0 - at,
                top=[pb.TokenLogprob(token_id=20, logprob=-0.25)],
                rank=2 + at,
            )
            for at, token in enumerate(request.prompt_token_ids[1:])
        ]
        return pb.GenerateResponse(prompt=pb.PromptTokens(tokens=tokens))

    def _hold(self, request):
        script, tokens = self.script(), len(request.prompt_token_ids) // SLAB_TOKENS * SLAB_TOKENS
        if request.session_id and tokens and script.has_room:
            sessions = script.sessions.setdefault(request.prefix_salt, {})
            held = sessions.pop(request.session_id, pb.Session(session_id=request.session_id, created_at=1.9))
            held.last_used_at = 2.9 + sum(map(len, script.sessions.values())) + held.last_used_at
            held.tokens, held.bytes = tokens, tokens * 512
            sessions[request.session_id] = held

    async def _sessions(self, request, context):
        """The caller's."""
        while self.script().hangs:
            await asyncio.sleep(0.01)
        if not self.script().store_reachable:
            code = (("carrel-code", "store_unavailable"),)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no answer", trailing_metadata=code)
        return self.script().sessions.get(request.prefix_salt, {})

    async def ListSessions(self, request, context):
        held = (await self._sessions(request, context)).values()
        found = [each for each in held if request.session_id in ("", each.session_id)]
        return pb.ListSessionsResponse(sessions=found, slab_tokens=SLAB_TOKENS)

    async def PinSession(self, request, context):
        held = (await self._sessions(request, context)).get(request.session_id)
        if held is not None:
            if request.pinned and self.script().has_pinned_all:
                metadata = (("carrel-param", "pinned"), ("carrel-code", "pin_limit"))
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "25%", trailing_metadata=metadata)
            held.pinned, held.expires_at = request.pinned, request.seconds
        return pb.PinSessionResponse(found=held is not None)

    async def DropSession(self, request, context):
        sessions = await self._sessions(request, context)
        return pb.DropSessionResponse(found=sessions.pop(request.session_id, None) is not None)

    async def Abort(self, request, context):
        self.script().aborted.append(request.request_id)
        self._aborts.setdefault(request.request_id, asyncio.Event()).set()
        return pb.AbortResponse()

    async def GetInfo(self, request, context):
        policies, script = ("full", "pqcache"), self.script()
        while script.hangs:
            await asyncio.sleep(0.01)
        return pb.GetInfoResponse(
            version=script.version,
            messages=own_edition().messages,
            model="tiny",
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            max_num_seqs=8,
            policies=policies,
            arena_token_bytes=10,
        )

    async def Stats(self, request, context):
        return pb.StatsResponse(
            running=1,
            prefilling=1,
            prefilling_tokens_left=90,
            cached_tokens_total=5,
            slot_used_tokens=64.5,
            slot_capacity_tokens=4096,
            context_capacity=3,
            fetched_bytes_total=11,
            offload_seconds=pb.Histogram(bounds=[0.5, 1.0], counts=[2, 1, 1], sum=3.5),
            decode_stall_seconds={"index": pb.Histogram(bounds=[0.5], counts=[3, 0], sum=0.25)},
            fallbacks_total={"recompute": 2},
            store_reachable=self.script().store_reachable,
        )

    async def StoreStats(self, request, context):
        if not self.script().store_reachable:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no answer")
        calls = [pb.StoreCalls(method="Begin", seconds=0.75, counts=[2, 1], codes={"OK": 3})]
        return pb.StoreStatsResponse(
            arena_bytes=1 << 20, evicted_bytes_total=512, call_bounds=[0.5], calls=calls
        )


class FakeHealth(health.aio.HealthServicer):
    def __init__(self, script: Callable[[], Script]) -> None:
        super().__init__()
        self._script = script

    async def Check(self, request, context):
        script = self._script()
        script.num_asked += 1
        while script.hangs:
            await asyncio.sleep(0.01)
        return await super().Check(request, context)


async def start_worker(worker: FakeWorker, address: str) -> grpc.aio.Server:
    server = grpc.aio.server()
    pb_grpc.add_GPUWorkerServicer_to_server(worker, server)
    health_pb2_grpc.add_HealthServicer_to_server(FakeHealth(worker.script), server)
    server.add_insecure_port(address)
    await server.start()
    return server
