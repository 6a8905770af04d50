"""What the service needs of an engine, and what an engine thread needs of the engine it drives."""

from __future__ import annotations

from typing import Protocol

from gpu_worker.records import EngineInfo, EngineStats, EventSink, GenerationRequest


class EnginePort(Protocol):
    """An engine as the service sees it: thread-safe, events arrive on the engine's own thread."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        """Queue a request. Its last event is a CompleteEvent or an ErrorEvent.

        Raises RequestError, CapacityError or EngineStopped at once; `sink` is then not called.
        """

    def abort(self, request_id: str) -> None:
        """End a request soon, with a CompleteEvent(ABORT). Unknown ids are ignored."""

    def stats(self) -> EngineStats: ...

    def drain(self, timeout_seconds: float) -> bool:
        """Take no more requests and wait for those that run; False when the time was not enough."""

    def close(self) -> None:
        """Abort what still runs and stop. Closing twice is harmless."""


class Engine(Protocol):
    """A single-threaded engine: all calls but `info` come from one thread."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: GenerationRequest, sink: EventSink) -> None: ...

    def abort(self, request_id: str) -> None:
        """End a request, with a CompleteEvent(ABORT) now or from a later `step`."""

    def step(self) -> bool:
        """Do one quantum of work; False when there was nothing to do but wait."""

    def tend(self) -> None:
        """Look after what goes on without requests; called about once a second."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...
