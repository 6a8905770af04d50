"""Starts the processes in order, restarts those that die, and ends them in the reverse order."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, Queue, SimpleQueue

from carrel.errors import ChildError
from carrel.process.events import Output, Progress, Status, parse_event
from carrel.serve.display import Listener
from carrel.serve.process import (
    UNUSABLE_EXIT_CODE,
    Child,
    ChildSpec,
    Line,
    adopting_orphans,
    describe_exit,
    end_orphans,
)
from carrel.serve.restarts import HangWatch, RestartPolicy
from carrel.serve.signals import STOP_SIGNALS, handling

TICK_S = 0.1
HARD_STOP_EXIT_CODE = 130
NO_RESTARTS = RestartPolicy(limit=0)


class StopRequested(Exception):
    """Someone asks to stop: the first time to drain, then to kill."""


@dataclass
class _Service:
    """A process over all its restarts. It is started when it is `due`, a monotonic time, and serves while it has a
    `watch`."""

    spec: ChildSpec
    due: float = 0.0
    child: Child | None = None
    watch: HangWatch | None = None
    # monotonic times
    deaths: deque[float] = field(default_factory=deque)


class Supervisor:
    """Runs processes until it is stopped. Holds no process when `run` or `supervise` returns or raises.

    A process that dies once all have served is restarted as `restarts` allows, after those before it in order. One that
    hangs is killed first.
    """

    def __init__(
        self,
        listener: Listener,
        environment: Mapping[str, str],
        restarts: RestartPolicy = NO_RESTARTS,
        tick_s: float = TICK_S,
    ) -> None:
        self._listener = listener
        self._environment = environment
        self._restarts = restarts
        self._tick_s = tick_s
        # not a SimpleQueue: its `get` may wait for ever when a signal interrupts it just before its timeout
        self._inbox: Queue[Line] = Queue()
        # SimpleQueue.put may be called from a signal's handler; Queue.put may not
        self._stops: SimpleQueue[None] = SimpleQueue()
        # in the order in which they start
        self._services: Sequence[_Service] = ()
        # our children that are not the supervisor's; None: orphans are not adopted
        self._not_ours: Collection[int] | None = None
        self._failure: ChildError | None = None
        self._is_serving = False
        self._is_stopping = False

    def run(self, specs: Sequence[ChildSpec], on_ready: Callable[[], None]) -> int:
        """As `supervise`, stopped by signals, and with an end of all that the processes leave. Main thread only."""
        with handling(STOP_SIGNALS, self.stop), adopting_orphans() as self._not_ours:
            return self.supervise(specs, on_ready)

    def supervise(self, specs: Sequence[ChildSpec], on_ready: Callable[[], None]) -> int:
        """Start each of `specs` once the one before serves, call `on_ready`, and watch.

        Returns 0 after a stop and a drain, 130 after a second stop. Raises ChildError when a child ends by itself or
        does not become ready, at the start or with no restart left; the others are ended first.
        """
        self._services = [_Service(spec) for spec in specs]
        try:
            while True:
                self._advance()
                if not self._is_serving and all(service.watch for service in self._services):
                    on_ready()
                    self._is_serving = True
                self._tick()
        except StopRequested:
            self._listener.draining()
            return self._drain()
        except ChildError as error:
            self._failure = error
            # reported first: ending the others may take a while
            self._listener.failed(error)
            self._drain()
            raise
        finally:
            for child in self._children():
                child.kill()
            # what outlives them would hold their pipes open
            self._end_orphans()
            for child in self._children():
                child.finish_reading()
            self._services = ()
            self._pump_rest()
            self._listener.close()

    def stop(self) -> None:
        """Drain; at the second call kill. May be called from a signal's handler, and from any thread."""
        self._stops.put(None)

    def check(self) -> None:
        """Raise the ChildError of a process that has ended by itself, if there is one. From any thread."""
        if self._failure is not None:
            raise self._failure
        for child in self._children():
            if (code := child.poll()) is not None and not self._is_stopping:
                raise self._error(child, f"ended with {describe_exit(code)}", code)

    def _children(self) -> list[Child]:
        return [child for service in self._services if (child := service.child) is not None]

    def _advance(self) -> None:
        """Start each process that is due once those before it serve, which it needs, and see which serve by now."""
        for service in self._services:
            spec = service.spec
            if service.child is None:
                if time.monotonic() < service.due:
                    return
                service.child = self._spawn(spec)
            if service.watch is None:
                if not spec.is_ready():
                    if service.child.age_s() > spec.start_timeout_s:
                        self._lose(service, f"did not become ready in {spec.start_timeout_s:g} s")
                    return
                self._listener.ready(spec.name)
                service.watch = HangWatch(spec.answers or spec.is_ready, spec.hang_timeout_s)

    def _spawn(self, spec: ChildSpec) -> Child:
        self._listener.starting(spec.name)
        try:
            return Child(spec, self._environment, self._inbox)
        except (OSError, RuntimeError) as error:
            raise ChildError(f"{spec.name} cannot be started: {error}") from error

    def _tick(self) -> None:
        """Handle what came in for one tick, then look for children that died or hang."""
        self._pump()
        for service in self._services:
            if service.child is None:
                continue
            if (code := service.child.poll()) is not None:
                self._lose(service, f"ended with {describe_exit(code)}", code)
            elif service.watch is not None and service.watch.has_hung():
                self._lose(service, f"did not answer for {service.spec.hang_timeout_s:g} s and was killed")

    def _lose(self, service: _Service, reason: str, code: int = 1) -> None:
        """End a process that is of no use, and plan its restart. Raises ChildError when there is none left."""
        child, policy = service.child, self._restarts
        assert child is not None
        child.kill()
        lines = child.last_lines()
        # what it wrote last belongs before the news of its death
        self._pump_rest()
        within = f"{policy.limit} within {policy.window_s / 60:g} minutes"
        now = time.monotonic()
        delay_s = policy.grant(service.deaths, now) if self._is_serving else None
        if delay_s is None:
            if self._is_serving and policy.limit:
                reason = f"{reason}, and was started again {within} already"
            # before the child goes: `check` finds one of the two
            self._failure = self._error(child, reason, code)
            service.child = None
            raise self._failure
        service.child = service.watch = None
        self._listener.lost(
            child.name,
            f"{child.name} {reason}; lost: {child.spec.loss}; starting it again in {delay_s:g} s "
            f"(restart {len(service.deaths)} of at most {within})",
            lines,
        )
        # what it started would hold its sockets and its memory
        self._end_orphans()
        child.spec.clean()
        service.due = now + delay_s

    def _error(self, child: Child, reason: str, code: int) -> ChildError:
        reason, lines = f"{child.name} {reason}", child.last_lines()
        if code == UNUSABLE_EXIT_CODE and not self._is_serving and lines:
            # its last line says what it cannot use, and what to do
            reason, lines = f"{reason}: {lines[-1]}", lines[:-1]
        return ChildError(reason, lines, code if code == UNUSABLE_EXIT_CODE else 1)

    def _end_orphans(self) -> None:
        if self._not_ours is not None:
            end_orphans({*self._not_ours, *(child.pid for child in self._children())})

    def _pump(self) -> None:
        """Show what children write, until the tick is over. Raises StopRequested."""
        deadline = time.monotonic() + self._tick_s
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                self._show(self._inbox.get(timeout=left))
            if not self._stops.empty():
                self._stops.get()
                raise StopRequested

    def _pump_rest(self) -> None:
        for _ in range(self._inbox.qsize()):
            self._show(self._inbox.get())

    def _show(self, line: Line) -> None:
        if line.is_stderr:
            self._listener.line(line.child, line.text)
            return
        match parse_event(line.text):
            case Progress() as progress:
                self._listener.progress(line.child, progress)
            case Status(text):
                self._listener.status(line.child, text)
            case Output(text):
                self._listener.line(line.child, text)

    def _drain(self) -> int:
        """SIGTERM to the last started first, each with its deadline, then SIGKILL."""
        self._is_stopping = True
        try:
            for child in reversed(self._children()):
                self._stop(child)
        except StopRequested:
            self._hurry()
            return HARD_STOP_EXIT_CODE
        return 0

    def _hurry(self) -> None:
        """Give the children that may end clients' answers a moment for it; one more stop ends that too."""
        began = time.monotonic()
        hurried = [child for child in self._children() if child.spec.hurry_timeout_s]
        for child in hurried:
            child.terminate()
        with contextlib.suppress(StopRequested):
            while any(
                child.poll() is None and time.monotonic() < began + child.spec.hurry_timeout_s
                for child in hurried
            ):
                self._pump()

    def _stop(self, child: Child) -> None:
        child.terminate()
        deadline = time.monotonic() + child.spec.stop_timeout_s
        while child.poll() is None:
            if time.monotonic() > deadline:
                self._listener.message(
                    f"{child.name} did not end in {child.spec.stop_timeout_s:g} s and was killed"
                )
                child.kill()
                return
            self._pump()
        if code := child.poll():
            self._listener.message(f"{child.name} ended with {describe_exit(code)} while stopping")
