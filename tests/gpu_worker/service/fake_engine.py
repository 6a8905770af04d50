"""An engine without a model: each step gives every running request its next prompt token again. Asked how likely a
prompt's tokens are, it counts from 1."""

from __future__ import annotations

import threading
import time

import numpy as np

from gpu_worker.records import (
    Budget,
    CompleteEvent,
    EngineInfo,
    EngineStats,
    ErrorEvent,
    EventSink,
    FinishReason,
    GenerationRequest,
    ProgressEvent,
    PromptEvent,
    TokenEvent,
    Usage,
)

INFO = EngineInfo(
    model="fake",
    model_type="fake",
    device="cpu",
    dtype="float32",
    vocab_size=100,
    max_model_len=64,
    max_num_seqs=2,
    eos_token_ids=(0,),
    policies=("full", "pqcache"),
    default_policy="pqcache",
    default_budget=Budget(share=0.1),
    num_parameters=7,
    slot_capacity_tokens=640,
    transport="shm",
)


class FakeEngine:
    """`gate` cleared stops it between steps; `error` is raised by step, `failure` ends the next request."""

    def __init__(self, info: EngineInfo = INFO) -> None:
        self.info = info
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.failure: Exception | None = None
        self.endless = False
        self.step_seconds = 0.001
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.was_closed = False
        self.num_steps = 0
        self.num_tended = 0
        self.has_store = True
        self._running: dict[str, tuple[GenerationRequest, EventSink, list[int]]] = {}
        self._stats = EngineStats(slot_capacity_tokens=10)

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        self._running[request.request_id] = (request, sink, [])
        sink(ProgressEvent(len(request.prompt_token_ids) - 1, cached_tokens=1))
        if (num_top := request.sampling.prompt_logprobs) is not None:
            token_ids = request.prompt_token_ids[1:]
            numbers = 1 + np.arange(len(token_ids) * (1 + num_top)).reshape(len(token_ids), 1 + num_top)
            sink(PromptEvent(token_ids, -numbers.astype(np.float32), numbers))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self._running:
            self._end(request_id, FinishReason.ABORT)

    def step(self) -> bool:
        if not self.gate.is_set():
            return False
        self.num_steps += 1
        time.sleep(self.step_seconds)
        if self.error is not None:
            raise self.error
        for request_id, (request, sink, tokens) in list(self._running.items()):
            tokens.append(request.prompt_token_ids[len(tokens) % len(request.prompt_token_ids)])
            sink(TokenEvent(tokens[-1], -0.5, ((tokens[-1], -0.5), (9, -1.5))))
            if not self.endless and len(tokens) == request.sampling.max_tokens:
                self._end(request_id, FinishReason.LENGTH)
        return True

    def stats(self) -> EngineStats:
        self._stats.running = len(self._running)
        return self._stats

    @property
    def is_store_reachable(self) -> bool:
        return self.has_store

    def check_store(self) -> None:
        self.num_tended += 1

    def close(self) -> None:
        self.was_closed = True

    def fail(self, request_id: str, error: Exception) -> None:
        self._running.pop(request_id)[1](ErrorEvent(error))

    def _end(self, request_id: str, reason: FinishReason) -> None:
        request, sink, tokens = self._running.pop(request_id)
        usage = Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=len(tokens))
        sink(CompleteEvent(reason, usage))
