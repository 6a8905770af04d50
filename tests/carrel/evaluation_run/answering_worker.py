"""A worker that knows the answers: it serves the real gRPC interface, and counts what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from commands import Command, Ended
from waiting import PATIENCE

from carrel.evaluation.documents import Codec
from carrel.evaluation.questions import Question
from gpu_worker.v1 import gpu_worker_pb2 as pb
from gpu_worker.v1 import gpu_worker_pb2_grpc

POLICIES = (
    "auto",
    "clusterkv",
    "clusterkv+ip",
    "clusterkv+l2",
    "full",
    "oracle",
    "pqcache",
    "snapkv",
    "snapkv+adakv",
)
DEVICE_BYTES, HOST_BYTES = 3 * 2**20, 5 * 2**20
# Milliseconds of a prefill and of a decode step under `full`; the others take twice and half as long.
PREFILL_MS, STEP_MS = 40.0, 6.0
MODEL = Path(__file__).resolve().parents[3] / "models" / "carrel-nano"
# Of the short run that it knows the questions of.
LENGTH, NUM_DOCUMENTS = 1024, 6


class FakeWorker(gpu_worker_pb2_grpc.GPUWorkerServicer):
    """Answers right, but for the policies in `wrong`. `fail_from`: number of the first request that is refused.
    `least_budget`: what `snapkv` refuses less than, in tokens. `broken`: policies that fail. `holds_from`:
    number of the first request that is not answered until `released` is set.
    """

    def __init__(self, codec: Codec, questions: list[Question], wrong: tuple[str, ...] = ()) -> None:
        self._codec = codec
        self._answers = {(q.context_ids + q.question_ids): q.answers[0] for q in questions}
        self._wrong = wrong
        self._lock = threading.Lock()
        self.requests: list[pb.GenerateRequest] = []
        self.fail_from: int | None = None
        self.num_busy = 0
        self.least_budget = 0
        self.broken: tuple[str, ...] = ()
        self.holds_from: int | None = None
        self.released = threading.Event()
        self.model = str(MODEL)

    def GetInfo(self, request: pb.GetInfoRequest, context: grpc.ServicerContext) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(
            model=self.model,
            device="cpu",
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=3,
            policies=POLICIES,
        )

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        with self._lock:
            if self.num_busy:
                self.num_busy -= 1
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "all seats are taken")
            if self.fail_from is not None and len(self.requests) >= self.fail_from:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the store is gone")
            if request.policy == "snapkv" and request.budget.tokens < self.least_budget:
                context.set_trailing_metadata((("carrel-param", "carrel.budget"),))
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "snapkv needs more tokens")
            if request.policy in self.broken:
                context.abort(grpc.StatusCode.INTERNAL, "no memory for the index")
            self.requests.append(request)
            is_held = self.holds_from is not None and len(self.requests) > self.holds_from
        if is_held:
            self.released.wait(PATIENCE)
        answer = self._answers[tuple(request.prompt_token_ids)]
        token_ids = self._codec.encode("nonsense" if request.policy in self._wrong else answer)
        yield pb.GenerateResponse(progress=pb.Progress(computed_tokens=1))
        for token_id in token_ids:
            yield pb.GenerateResponse(token=pb.Token(token_id=token_id))
        usage = pb.Usage(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=len(token_ids) + 1,
            budget_tokens=int(request.budget.share * len(request.prompt_token_ids)),
            attended_tokens=100,
            device_bytes=DEVICE_BYTES,
            prefill_ms=PREFILL_MS,
            decode_ms=STEP_MS * (self._num_decoded(request) + len(token_ids)),
        )
        if request.policy != "full":
            usage.hit_rate, usage.bytes_moved = 0.9, 2**20
            usage.prefill_ms *= 2
            usage.decode_ms /= 2
            if request.measure:
                usage.attention_mass, usage.recall_rate, usage.best_recall = 0.75, 0.5, 0.625
                usage.offloaded_tokens = len(request.prompt_token_ids)
        if request.policy in ("oracle", "pqcache", "clusterkv"):
            usage.offloaded_tokens, usage.host_bytes = len(request.prompt_token_ids), HOST_BYTES
        yield pb.GenerateResponse(complete=pb.Complete(finish_reason=pb.FINISH_REASON_STOP, usage=usage))

    def _num_decoded(self, request: pb.GenerateRequest) -> int:
        """Tokens of the prompt that go through decode steps."""
        return len(request.prompt_token_ids) - (request.num_prefill_tokens or len(request.prompt_token_ids))


def serve(worker: FakeWorker, folder: Path) -> tuple[grpc.Server, str]:
    """A running server and its address; the caller stops it."""
    server = grpc.server(ThreadPoolExecutor(8))
    gpu_worker_pb2_grpc.add_GPUWorkerServicer_to_server(worker, server)
    address = f"unix:{folder}/fake.sock"
    server.add_insecure_port(address)
    server.start()
    return server, address


@dataclass(frozen=True)
class FakeRun:
    """A served fake worker, and `carrel eval` with the options that reach it."""

    worker: FakeWorker
    command: Command
    options: dict[str, Any]

    @property
    def arguments(self) -> list[str]:
        return ["eval", *(str(word) for each in self.options.items() for word in each)]

    def __call__(self, *words: Any, code: int = 0) -> Ended:
        """Run it with more options, which replace its own, and expect this exit code."""
        ended = self.command(*self.without(*map(str, words)).arguments, *words)
        assert ended.code == code, ended
        return ended

    def without(self, *flags: str) -> FakeRun:
        return replace(
            self, options={flag: value for flag, value in self.options.items() if flag not in flags}
        )
