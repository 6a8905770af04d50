"""Asks a worker for an answer, token ids in and out, over gRPC."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

import grpc

from carrel.errors import EvaluationError
from carrel.evaluation.cells import Cell, is_tokens
from carrel.evaluation.questions import Question
from carrel.process.request_limits import PARAM_KEY
from carrel.process.trailing import trailing_of
from gpu_worker.v1 import gpu_worker_pb2, gpu_worker_pb2_grpc

INFO_TIMEOUT_S = 10.0
# A full queue or arena passes as other requests end; it is asked again, with pauses.
BUSY_TRIES = 8
BUSY_PAUSE_S = 2.0
# No other question would be answered either.
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
# What a refusal is about when the policy cannot keep to the budget.
BUDGET_PARAM = "carrel.budget"


class BudgetRefused(EvaluationError):
    """The policy cannot serve the budget, whatever the question."""


class AnswerFailed(EvaluationError):
    """The worker is there, and could not answer."""


@dataclass(frozen=True)
class Generation:
    """An answer's token ids, the end token left out, and its cost."""

    token_ids: tuple[int, ...]
    usage: gpu_worker_pb2.Usage


class WorkerClient:
    """A connection to one worker; `generate` may be called from many threads."""

    def __init__(self, target: str, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(target)
        self._stub = gpu_worker_pb2_grpc.GPUWorkerStub(self._channel)

    def info(self) -> gpu_worker_pb2.GetInfoResponse:
        """Return the worker's information about its model. Raises EvaluationError when it does not answer."""
        try:
            return self._stub.GetInfo(
                gpu_worker_pb2.GetInfoRequest(), timeout=INFO_TIMEOUT_S, wait_for_ready=True
            )
        except grpc.RpcError as exc:
            raise EvaluationError(f"no worker answers at {self._target}: {_reason(exc)}") from exc

    def generate(self, cell: Cell, question: Question, is_measured: bool) -> Generation:
        """The greedy answer to `question` as `cell` asks it. is_measured: have attention mass and recall rate measured.

        Raises AnswerFailed when the worker cannot answer this question, BudgetRefused when the policy cannot keep to
        the budget, and EvaluationError when the worker is gone, or does not answer in time.
        """
        for left in reversed(range(BUSY_TRIES)):
            try:
                return self._generate(make_request(cell, question, is_measured))
            except grpc.RpcError as exc:
                if _refuses_budget(exc):
                    raise BudgetRefused(f"{cell.name}: {exc.details()}") from exc
                if exc.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or not left:
                    kind = EvaluationError if exc.code() in GONE else AnswerFailed
                    raise kind(f"{cell.name}, document {question.index}: {_reason(exc)}") from exc
            time.sleep(BUSY_PAUSE_S)
        raise AssertionError("unreachable")

    def _generate(self, request: gpu_worker_pb2.GenerateRequest) -> Generation:
        token_ids: list[int] = []
        usage = gpu_worker_pb2.Usage()
        for event in self._stub.Generate(request, timeout=self._timeout_s):
            match event.WhichOneof("event"):
                case "token":
                    token_ids.append(event.token.token_id)
                case "complete":
                    usage = event.complete.usage
        return Generation(tuple(token_ids), usage)

    def close(self) -> None:
        """Ends every call that still runs."""
        self._channel.close()


def make_request(cell: Cell, question: Question, is_measured: bool) -> gpu_worker_pb2.GenerateRequest:
    """The cell's request for one question: greedy, and under P2 with the context prefilled alone."""
    return gpu_worker_pb2.GenerateRequest(
        request_id=f"eval-{uuid.uuid4().hex}",
        prompt_token_ids=question.context_ids + question.question_ids,
        sampling=gpu_worker_pb2.SamplingParams(max_tokens=question.max_tokens, temperature=0),
        policy=cell.policy,
        budget=make_budget(cell.budget),
        num_prefill_tokens=len(question.context_ids) if cell.protocol == "P2" else 0,
        measure=is_measured,
    )


def make_budget(budget: float | None) -> gpu_worker_pb2.Budget:
    """The cell's budget; all where it has none."""
    number = budget or 1.0
    if is_tokens(number):
        return gpu_worker_pb2.Budget(tokens=int(number))
    return gpu_worker_pb2.Budget(share=number)


def _refuses_budget(error: grpc.RpcError) -> bool:
    if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
        return False
    return trailing_of(error).get(PARAM_KEY) == BUDGET_PARAM


def _reason(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"
