"""A worker from ready to ended: serve, drain on a signal, report a dead engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from carrel.process.certificates import Identity
from carrel.process.events import ProcessEvents
from carrel.process.noted_errors import NotedErrors
from gpu_worker.errors import EngineStopped
from gpu_worker.grammar import Grammars
from gpu_worker.records import EngineStats
from gpu_worker.service.engine_thread import Engine, EngineThread
from gpu_worker.service.hang_alarm import HangAlarm
from gpu_worker.service.server import WorkerServer
from gpu_worker.store.sessions import Sessions
from gpu_worker.store.traces import Traces

logger = logging.getLogger(__name__)

STATUS_SECONDS = 1.0
# of readings, between which rates are logged
NUM_READINGS = 5
FLUSH_SECONDS = 2.0

EXIT_OK = 0
EXIT_ENGINE_DIED = 1

# Work before requests are served; asks its argument whether to end.
Preparation = Callable[[Callable[[], bool]], None]


class Lifecycle:
    """Runs one engine behind one server until `request_stop` or the engine's death; built inside a loop.

    An engine that serves and makes no progress for `hang_timeout_seconds` ends the process (HangAlarm); 0: never.
    """

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        listen: str,
        max_queue: int,
        shutdown_timeout_seconds: float,
        events: ProcessEvents,
        status_seconds: float = STATUS_SECONDS,
        prepare: Preparation | None = None,
        hang_timeout_seconds: float = 0.0,
        grammars: Grammars | None = None,
        identity: Identity | None = None,
        traces: Traces | None = None,
    ) -> None:
        """prepare: done first, on the engine's thread: some libraries keep what they plan by thread. grammars, identity
        and traces: as `WorkerServer` has them."""
        loop = asyncio.get_running_loop()
        self._listen = listen
        self._shutdown_timeout_seconds = shutdown_timeout_seconds
        self._events = events
        self._status_seconds = status_seconds
        self._prepare = prepare
        self._ended = asyncio.Event()
        self._alarm = HangAlarm(hang_timeout_seconds)
        self._engine = EngineThread(
            engine, max_queue, lambda: loop.call_soon_threadsafe(self._ended.set), self._alarm.reset
        )
        self._server = WorkerServer(
            self._engine, sessions, listen, grammars=grammars, identity=identity, traces=traces
        )

    def request_stop(self) -> None:
        """Begin to drain; for the loop's own thread, a signal handler say."""
        self._ended.set()

    async def run(self) -> int:
        """Serve to the end and return the exit status: 0 after draining, 1 when the engine died.

        Raises ConfigError when the address cannot be bound.
        """
        try:
            if (prepare := self._prepare) is not None:
                # An engine that ends has reported so before: see `_ended`.
                with contextlib.suppress(EngineStopped):
                    await asyncio.wrap_future(self._engine.call(lambda: prepare(self._ended.is_set)))
            if not self._ended.is_set():
                await self._serve()
        finally:
            # aborts what is left; the streams then have their last events to send
            await asyncio.to_thread(self._engine.close)
            self._alarm.close()
            await self._server.stop(FLUSH_SECONDS)
        return EXIT_ENGINE_DIED if self._engine.is_dead else EXIT_OK

    async def _serve(self) -> None:
        self._alarm.start()
        await self._server.start()
        self._events.ready(self._listen)
        status = asyncio.create_task(self._report_status())
        await self._ended.wait()
        status.cancel()
        # refuse first, so that a client that sees NOT_SERVING is refused
        self._engine.drain(0)
        await self._server.stop_serving()
        if not self._engine.is_dead:
            await asyncio.to_thread(self._engine.drain, self._shutdown_timeout_seconds)

    async def _report_status(self) -> None:
        errors = NotedErrors(logger, "telling what the worker does")
        readings = deque([(self._engine.stats(), time.monotonic())], maxlen=NUM_READINGS)
        while True:
            await asyncio.sleep(self._status_seconds)
            with errors.noting():
                now, at = self._engine.stats(), time.monotonic()
                before, since = readings[0]
                if not is_idle(readings[-1][0], now):
                    self._events.status(status_line(before, now, at - since))
                readings.append((now, at))


def is_idle(before: EngineStats, now: EngineStats) -> bool:
    """True when nothing runs, waits, or has been done between two readings."""
    return (
        now.running == now.waiting == 0
        and before.prompt_tokens_total == now.prompt_tokens_total
        and before.generation_tokens_total == now.generation_tokens_total
    )


def status_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """Gauges of `now`, rates between two readings `seconds` apart."""
    prompt = (now.prompt_tokens_total - before.prompt_tokens_total) / seconds
    generation = (now.generation_tokens_total - before.generation_tokens_total) / seconds
    parts = [f"running {now.running}, waiting {now.waiting}"]
    if now.prefilling:
        done = 1 - now.prefilling_tokens_left / now.prefilling_tokens
        prompts = "1 prompt" if now.prefilling == 1 else f"{now.prefilling} prompts"
        parts.append(f"prefill {prompts} {100 * done:.0f} %")
    parts.append(f"prompt {prompt:.0f} tok/s, generation {generation:.0f} tok/s")
    if now.slot_capacity_tokens:
        parts.append(f"slots {100 * now.slot_used_tokens / now.slot_capacity_tokens:.0f} %")
    if selected := now.selected_rows_total - before.selected_rows_total:
        hits = now.hit_rows_total - before.hit_rows_total
        parts.append(f"hit rate {100 * hits / selected:.0f} %")
    if not now.store_reachable:
        parts.append("KV store unreachable")
    return "; ".join(parts)
