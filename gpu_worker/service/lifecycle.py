"""A worker from ready to ended: serve, drain on a signal, report a dead engine."""

from __future__ import annotations

import asyncio
import time

from carrel.process.events import ProcessEvents
from gpu_worker.service.engine_port import Engine
from gpu_worker.service.engine_thread import EngineThread
from gpu_worker.service.server import WorkerServer
from gpu_worker.service.status_line import is_idle, status_line

STATUS_SECONDS = 5.0
FLUSH_SECONDS = 2.0

EXIT_OK = 0
EXIT_ENGINE_DIED = 1


class Lifecycle:
    """Runs one engine behind one server until `request_stop` or the engine's death; built inside a loop."""

    def __init__(
        self,
        engine: Engine,
        listen: str,
        max_queue: int,
        shutdown_timeout_seconds: float,
        events: ProcessEvents,
        status_seconds: float = STATUS_SECONDS,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._listen = listen
        self._shutdown_timeout_seconds = shutdown_timeout_seconds
        self._events = events
        self._status_seconds = status_seconds
        self._ended = asyncio.Event()
        self._engine = EngineThread(engine, max_queue, lambda: loop.call_soon_threadsafe(self._ended.set))
        self._server = WorkerServer(self._engine, listen)

    def request_stop(self) -> None:
        """Begin to drain; for the loop's own thread, a signal handler say."""
        self._ended.set()

    async def run(self) -> int:
        """Serve to the end and return the exit status: 0 after draining, 1 when the engine died.

        Raises ConfigError when the address cannot be bound.
        """
        try:
            await self._server.start()
            self._events.ready(self._listen)
            status = asyncio.create_task(self._report_status())
            await self._ended.wait()
            status.cancel()
            # refuse first, so that who sees NOT_SERVING is refused
            self._engine.drain(0)
            await self._server.stop_serving()
            if not self._engine.is_dead:
                await asyncio.to_thread(self._engine.drain, self._shutdown_timeout_seconds)
        finally:
            # aborts what is left; the streams then have their last events to send
            await asyncio.to_thread(self._engine.close)
            await self._server.stop(FLUSH_SECONDS)
        return EXIT_ENGINE_DIED if self._engine.is_dead else EXIT_OK

    async def _report_status(self) -> None:
        before, since = self._engine.stats(), time.monotonic()
        while True:
            await asyncio.sleep(self._status_seconds)
            now, at = self._engine.stats(), time.monotonic()
            if not is_idle(before, now):
                self._events.status(status_line(before, now, at - since))
            before, since = now, at
