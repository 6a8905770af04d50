"""One thread that drives a single-threaded engine for callers on other threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from gpu_worker.errors import CapacityError, EngineStopped, RequestError, WorkerError
from gpu_worker.records import (
    AttentionEvent,
    CompleteEvent,
    EngineInfo,
    EngineStats,
    ErrorEvent,
    Event,
    EventSink,
    GenerationRequest,
    ProgressEvent,
    PromptEvent,
    TokenEvent,
)

logger = logging.getLogger(__name__)

# an idle engine is asked for its gauges this often
IDLE_SECONDS = 1.0
# gauges of an engine that works are at most this old
STATS_SECONDS = 0.1
# pause when a step had nothing to do but wait, for an index say
WAIT_SECONDS = 0.001
JOIN_SECONDS = 10.0


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

    def check_store(self) -> None:
        """Check the KV store; called about once a second, also without requests."""

    def stats(self) -> EngineStats: ...

    @property
    def is_store_reachable(self) -> bool:
        """Return whether the store answers, without waiting for a step; any thread may ask."""

    def close(self) -> None: ...


class EngineThread:
    """Submits and aborts go through an inbox that is emptied between steps; events arrive on the engine's own thread.

    At most `engine.info.max_num_seqs + max_queue` requests live at once. An unexpected error of the engine
    ends every live request with an ErrorEvent and calls `on_death` once, from the engine's thread. `on_progress` is
    called there too, at every turn and every event: about once a second at least, unless the engine hangs.
    """

    def __init__(
        self,
        engine: Engine,
        max_queue: int,
        on_death: Callable[[], object],
        on_progress: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine = engine
        self._on_death = on_death
        self._on_progress = on_progress
        self._info = engine.info
        self._capacity = engine.info.max_num_seqs + max_queue
        self._max_queue = max_queue
        self._condition = threading.Condition()
        # all below are guarded by the condition
        self._live: dict[str, EventSink] = {}
        self._inbox: list[Callable[[], None]] = []
        self._calls: list[Future[None]] = []
        self._num_inbox_submits = 0
        self._num_inbox_tokens = 0
        self._is_draining = False
        self._is_stopping = False
        self._is_dead = False
        self._has_ended = False
        self._stats = replace(engine.stats())
        # Until then they are new enough; the engine's thread alone knows it.
        self._stats_until = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def is_dead(self) -> bool:
        """True after an unexpected error."""
        with self._condition:
            return self._is_dead

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        """Queue a request. Its last event is a CompleteEvent or an ErrorEvent.

        Raises RequestError, CapacityError or EngineStopped at once; `sink` is then not called.
        """
        request_id = request.request_id
        with self._condition:
            if self._is_dead:
                raise EngineStopped(
                    "The engine has stopped after an internal error; the worker must restart."
                )
            if self._is_draining or self._is_stopping:
                raise EngineStopped("The worker is shutting down and takes no more requests.")
            if request_id in self._live:
                raise RequestError(f"request_id {request_id!r} belongs to a running request.", "request_id")
            if len(self._live) >= self._capacity:
                raise CapacityError(
                    f"All {self._info.max_num_seqs} seats and {self._max_queue} queue places are taken; "
                    "retry later or start the worker with a larger --max-queue."
                )
            self._live[request_id] = sink
            self._num_inbox_submits += 1
            self._num_inbox_tokens += len(request.prompt_token_ids)
            self._inbox.append(lambda: self._submit(request))
            self._condition.notify_all()

    def abort(self, request_id: str) -> None:
        """End a request soon, with a CompleteEvent(ABORT). Unknown ids are ignored."""
        with self._condition:
            if request_id in self._live:
                self._inbox.append(lambda: self._engine.abort(request_id))
                self._condition.notify_all()

    def call(self, work: Callable[[], None]) -> Future[None]:
        """Do `work` on the engine's thread, between two steps. The future has what it raised, and the engine goes on;
        EngineStopped where that ends before."""
        done: Future[None] = Future()

        def do() -> None:
            with self._condition:
                self._calls.remove(done)
            if not done.set_running_or_notify_cancel():
                return
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._condition:
            if self._has_ended:
                done.set_exception(EngineStopped("The engine has stopped."))
            else:
                self._calls.append(done)
                self._inbox.append(do)
                self._condition.notify_all()
        return done

    def stats(self) -> EngineStats:
        """Return the latest statistics. `store_reachable` is current however long a step takes; the rest may be moments
        old."""
        is_reachable = self._engine.is_store_reachable
        with self._condition:
            return replace(
                self._stats,
                waiting=self._stats.waiting + self._num_inbox_submits,
                waiting_tokens=self._stats.waiting_tokens + self._num_inbox_tokens,
                store_reachable=is_reachable,
            )

    def drain(self, timeout_seconds: float) -> bool:
        """Take no more requests and wait for those that run; False when the time was not enough."""
        with self._condition:
            self._is_draining = True
            return self._condition.wait_for(lambda: not self._live, timeout_seconds)

    def close(self) -> None:
        """Abort what still runs and stop. Closing twice is harmless."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while self._take_turn():
                pass
            self._abort_live()
        except BaseException:
            # also a panic of a library in Rust, which is not an Exception: the process must hear of it
            logger.exception("the engine failed")
            self._die()
        finally:
            self._refuse_calls()
            self._engine.close()

    def _take_turn(self) -> bool:
        """Inbox, then one step; False to stop."""
        self._on_progress()
        with self._condition:
            if not self._inbox and not self._is_stopping and not self._engine.has_work:
                self._condition.wait(IDLE_SECONDS)
            if self._is_stopping:
                return False
            commands, self._inbox = self._inbox, []
        for command in commands:
            command()
        did_work = self._engine.step() if self._engine.has_work else True
        self._publish_stats(is_due=bool(commands) or not did_work)
        with self._condition:
            if not did_work and not self._inbox and not self._is_stopping:
                self._condition.wait(WAIT_SECONDS)
        return True

    def _publish_stats(self, is_due: bool) -> None:
        """Check the store and collect the gauges, now and then: that may wait for the device, which a step must not."""
        now = time.monotonic()
        if not (is_due or not self._engine.has_work or now >= self._stats_until):
            return
        self._engine.check_store()
        # a copy: the engine goes on counting in its own
        stats = replace(self._engine.stats())
        with self._condition:
            self._stats = stats
        self._stats_until = now + STATS_SECONDS

    def _submit(self, request: GenerationRequest) -> None:
        with self._condition:
            self._num_inbox_submits -= 1
            self._num_inbox_tokens -= len(request.prompt_token_ids)

        def sink(event: Event) -> None:
            self._deliver(request.request_id, event)

        try:
            self._engine.submit(request, sink)
        except WorkerError as error:
            sink(ErrorEvent(error))

    def _refuse_calls(self) -> None:
        """Refuse the calls that the engine's thread, which ends, no longer makes."""
        with self._condition:
            self._has_ended = True
            calls, self._calls = self._calls, []
        for call in calls:
            if call.set_running_or_notify_cancel():
                call.set_exception(EngineStopped("The engine has stopped."))

    def _deliver(self, request_id: str, event: Event) -> None:
        self._on_progress()
        with self._condition:
            sink = self._live.get(request_id)
            if sink is not None and _is_last(event):
                del self._live[request_id]
                self._condition.notify_all()
        if sink is not None:
            sink(event)

    def _abort_live(self) -> None:
        with self._condition:
            live = list(self._live)
        for request_id in live:
            self._engine.abort(request_id)
        self._fail_live(EngineStopped("The worker shut down before the request ended."))

    def _fail_live(self, error: WorkerError) -> None:
        with self._condition:
            live = list(self._live)
        for request_id in live:
            self._deliver(request_id, ErrorEvent(error))

    def _die(self) -> None:
        with self._condition:
            self._is_dead = True
            self._inbox.clear()
            self._num_inbox_submits = self._num_inbox_tokens = 0
        self._fail_live(EngineStopped("The engine stopped because of an internal error."))
        self._on_death()


def _is_last(event: Event) -> bool:
    match event:
        case CompleteEvent() | ErrorEvent():
            return True
        case TokenEvent() | PromptEvent() | ProgressEvent() | AttentionEvent():
            return False
