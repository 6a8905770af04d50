"""Starts the processes in order, restarts those that die, and ends them in the reverse order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
from carrel.serve.restarts import HangWatch, RestartPolicy, Restarts
from carrel.serve.signals import signals_to

TICK_S = 0.1
HARD_STOP_EXIT_CODE = 130
NO_RESTARTS = RestartPolicy(limit=0)


class StopRequested(Exception):
    """The first stop: drain."""


class HardStop(Exception):
    """The second stop: kill."""


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
        self._restarts = Restarts(restarts)
        self._tick_s = tick_s
        # not a SimpleQueue: its `get` may wait for ever when a signal interrupts it just before its timeout
        self._inbox: Queue[Line] = Queue()
        # SimpleQueue.put may be called from a signal's handler; Queue.put may not
        self._stops: SimpleQueue[None] = SimpleQueue()
        self._specs: Sequence[ChildSpec] = ()
        # in the order of the specs; those being started again too
        self._children: list[Child] = []
        # when to restart a process that died
        self._due: dict[str, float] = {}
        self._restarting: set[str] = set()
        # of those that serve
        self._watches: dict[str, HangWatch] = {}
        # our children that are not the supervisor's; None: orphans are not adopted
        self._not_ours: Collection[int] | None = None
        self._failure: ChildError | None = None
        self._is_serving = False
        self._is_stopping = False

    def run(self, specs: Sequence[ChildSpec], on_ready: Callable[[], None]) -> int:
        """As `supervise`, stopped by signals, and with an end of all that the processes leave. Main thread only."""
        with signals_to(self.stop), adopting_orphans() as self._not_ours:
            try:
                return self.supervise(specs, on_ready)
            finally:
                self._end_orphans()

    def supervise(self, specs: Sequence[ChildSpec], on_ready: Callable[[], None]) -> int:
        """Start each of `specs` once the one before serves, call `on_ready`, and watch.

        Returns 0 after a stop and a drain, 130 after a second stop. Raises ChildError when a child ends by itself or
        does not become ready, at the start or with no restart left; the others are ended first.
        """
        self._specs = specs
        try:
            for spec in specs:
                self._start(spec)
            on_ready()
            self._is_serving = True
            while True:
                self._tick()
                self._restart()
        except StopRequested:
            self._listener.draining()
            return self._drain()
        except HardStop:
            return HARD_STOP_EXIT_CODE
        except ChildError as error:
            self._failure = error
            # reported first: ending the others may take a while
            self._listener.failed(error)
            self._drain()
            raise
        finally:
            for child in self._children:
                child.kill()
            # what outlives them would hold their pipes open
            self._end_orphans()
            for child in self._children:
                child.finish_reading()
            self._children.clear()
            self._pump_rest()
            self._listener.close()

    def stop(self) -> None:
        """Drain; at the second call kill. May be called from a signal's handler, and from any thread."""
        self._stops.put(None)

    def check(self) -> None:
        """Raise the ChildError of a process that has ended by itself, if there is one. From any thread."""
        if self._failure is not None:
            raise self._failure
        for child in list(self._children):
            if (code := child.exit_code()) is not None and not self._is_stopping:
                raise self._error(_ended(child, code), child.last_lines(), code)

    def _start(self, spec: ChildSpec) -> None:
        child = self._spawn(spec)
        while not spec.is_ready():
            if child.age_s() > spec.start_timeout_s:
                self._lose(child, _late(spec))
            self._tick()
        self._serves(spec)

    def _serves(self, spec: ChildSpec) -> None:
        self._listener.ready(spec.name)
        self._watches[spec.name] = HangWatch(spec.answers or spec.is_ready, spec.hang_timeout_s)

    def _spawn(self, spec: ChildSpec) -> Child:
        self._listener.starting(spec.name)
        try:
            child = Child(spec, self._environment, self._inbox)
        except (OSError, RuntimeError) as error:
            raise ChildError(f"{spec.name} cannot be started: {error}") from error
        self._children.append(child)
        order = [spec.name for spec in self._specs]
        self._children.sort(key=lambda child: order.index(child.name))
        return child

    def _tick(self) -> None:
        """Handle what came in for one tick, then look for children that died or hang."""
        self._pump()
        for child in list(self._children):
            if (code := child.exit_code()) is not None:
                self._lose(child, _ended(child, code), code)
            elif child.name in self._watches and self._watches[child.name].has_hung():
                child.kill()
                self._lose(
                    child, f"{child.name} did not answer for {child.spec.hang_timeout_s:g} s and was killed"
                )

    def _lose(self, child: Child, reason: str, code: int = 1) -> None:
        """Plan the restart of a child that has ended. Raises ChildError when there is none left."""
        lines = child.last_lines()
        # what it wrote last belongs before the news of its death
        self._pump_rest()
        policy = self._restarts.policy
        within = f"{policy.limit} within {policy.window_s / 60:g} minutes"
        restart = self._restarts.grant(child.name) if self._is_serving else None
        if restart is None:
            if self._is_serving and policy.limit:
                reason = f"{reason}, and was started again {within} already"
            self._failure = self._error(reason, lines, code)
        if child.exit_code() is not None:
            self._children.remove(child)
        self._watches.pop(child.name, None)
        self._restarting.discard(child.name)
        if restart is None:
            assert self._failure is not None
            raise self._failure
        self._listener.lost(
            child.name,
            f"{reason}; lost: {child.spec.loss}; starting it again in {restart.delay_s:g} s "
            f"(restart {restart.number} of at most {within})",
            lines,
        )
        # what it started would hold its sockets and its memory
        self._end_orphans()
        child.spec.clean()
        self._due[child.name] = time.monotonic() + restart.delay_s

    def _error(self, reason: str, lines: tuple[str, ...], code: int) -> ChildError:
        if code == UNUSABLE_EXIT_CODE and not self._is_serving and lines:
            # its last line says what it cannot use, and what to do
            reason, lines = f"{reason}: {lines[-1]}", lines[:-1]
        return ChildError(reason, lines, code if code == UNUSABLE_EXIT_CODE else 1)

    def _restart(self) -> None:
        """Start the children whose pause is over, and check whether those that were started serve."""
        for child in list(self._children):
            if child.name not in self._restarting:
                continue
            if child.spec.is_ready():
                self._restarting.remove(child.name)
                self._serves(child.spec)
            elif child.age_s() > child.spec.start_timeout_s:
                child.kill()
                self._lose(child, _late(child.spec))
        for spec in self._specs:
            if spec.name in self._due:
                if time.monotonic() < self._due[spec.name]:
                    return
                del self._due[spec.name]
                self._restarting.add(spec.name)
                self._spawn(spec)
            # the later ones need it
            if spec.name in self._restarting:
                return

    def _end_orphans(self) -> None:
        if self._not_ours is not None:
            end_orphans({*self._not_ours, *(child.pid for child in self._children)})

    def _pump(self) -> None:
        """Show what children write, until the tick is over. Raises StopRequested and HardStop."""
        deadline = time.monotonic() + self._tick_s
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                self._show(self._inbox.get(timeout=left))
            if not self._stops.empty():
                self._stops.get()
                raise HardStop if self._is_stopping else StopRequested

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
            for child in reversed(self._children):
                self._stop(child)
        except HardStop:
            self._hurry()
            return HARD_STOP_EXIT_CODE
        return 0

    def _hurry(self) -> None:
        """Give the children that may end clients' answers a moment for it; one more stop ends that too."""
        began = time.monotonic()
        hurried = [child for child in self._children if child.spec.hurry_timeout_s]
        for child in hurried:
            child.terminate()
        with contextlib.suppress(HardStop):
            while any(
                child.exit_code() is None and time.monotonic() < began + child.spec.hurry_timeout_s
                for child in hurried
            ):
                self._pump()

    def _stop(self, child: Child) -> None:
        child.terminate()
        deadline = time.monotonic() + child.spec.stop_timeout_s
        while child.exit_code() is None:
            if time.monotonic() > deadline:
                self._listener.message(
                    f"{child.name} did not end in {child.spec.stop_timeout_s:g} s and was killed"
                )
                child.kill()
                return
            self._pump()
        if code := child.exit_code():
            self._listener.message(f"{child.name} ended with {describe_exit(code)} while stopping")


def _ended(child: Child, code: int) -> str:
    return f"{child.name} ended with {describe_exit(code)}"


def _late(spec: ChildSpec) -> str:
    return f"{spec.name} did not become ready in {spec.start_timeout_s:g} s"
