"""Carrel's own engine, in this process, with its store in the same process: its peak memory counts the store's."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.rivals.base import Rival
from benchmarks.runs import Answer
from gpu_worker.config import WorkerConfig
from gpu_worker.engine.build import build_engine
from gpu_worker.records import (
    Budget,
    CompleteEvent,
    ErrorEvent,
    Event,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)
from kv_store.local import LocalStore

ARENA_BYTES = 512 << 20


def full(model: str, max_model_len: int) -> Rival:
    return CarrelEngine(model, max_model_len, "full")


def pqcache(model: str, max_model_len: int) -> Rival:
    return CarrelEngine(model, max_model_len, "pqcache")


class CarrelEngine(Rival):
    """The real engine without the service around it; recall policies at n/10."""

    def __init__(self, model: str, max_model_len: int, policy: str) -> None:
        self._policy = policy
        self._store = LocalStore(ARENA_BYTES)
        config = WorkerConfig(
            model=model,
            listen="127.0.0.1:1",
            store=self._store.target,
            device="cpu",
            dtype="float32",
            max_model_len=max_model_len,
            max_num_seqs=1,
        )
        self._engine = build_engine(config, lambda stage, done, total: None)
        self._num_requests = 0

    def answer(self, token_ids: Sequence[int], num_tokens: int) -> Answer:
        tokens: list[int] = []
        times: list[float] = []
        ended: list[Event] = []

        def sink(event: Event) -> None:
            match event:
                case TokenEvent(token_id):
                    tokens.append(token_id)
                    times.append(time.perf_counter())
                case CompleteEvent() | ErrorEvent():
                    ended.append(event)

        self._num_requests += 1
        request = GenerationRequest(
            f"benchmark-{self._num_requests}",
            tuple(token_ids),
            SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
            self._policy,
            Budget(share=0.1),
        )
        begin = time.perf_counter()
        self._engine.submit(request, sink)
        while not ended:
            self._engine.step()
        if isinstance(ended[0], ErrorEvent):
            raise ended[0].error
        return Answer.from_times(tokens, begin, times)

    def close(self) -> None:
        self._engine.close()
        self._store.close()
