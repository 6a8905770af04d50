"""Starts the processes in order, restarts those that die, and ends them in the reverse order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue

from carrel.errors import ChildError
from carrel.process.events import Output, Progress, Status, parse_event
from carrel.serve.checks import UNUSABLE_EXIT_CODE
from carrel.serve.display import Display
from carrel.serve.process import (
    Child,
    ChildSpec,
    Line,
    Message,
    Signalled,
    adopting_orphans,
    describe_exit,
    end_orphans,
)
from carrel.serve.restarts import HangWatch, RestartPolicy, Restarts
from carrel.serve.signals import signals_to

TICK_S = 0.1
HARD_STOP_EXIT_CODE = 130


class StopRequested(Exception):
    """The first signal: drain."""


class HardStop(Exception):
    """The second signal: kill."""


class Supervisor:
    """Runs processes until a signal comes. Holds no process when `run` returns or raises.

    A process that dies once all have served is restarted as `restarts` allows, after those before it in order. One that
    hangs is killed first.
    """

    def __init__(
        self,
        display: Display,
        environment: Mapping[str, str],
        restarts: RestartPolicy,
        tick_s: float = TICK_S,
    ) -> None:
        self._display = display
        self._environment = environment
        self._restarts = Restarts(restarts)
        self._tick_s = tick_s
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._specs: Sequence[ChildSpec] = ()
        # in the order of the specs; those being started again too
        self._children: list[Child] = []
        # when to restart a process that died
        self._due: dict[str, float] = {}
        self._restarting: set[str] = set()
        # of those that serve
        self._watches: dict[str, HangWatch] = {}
        self._not_ours: set[int] = set()
        self._is_serving = False
        self._is_stopping = False

    def run(self, specs: Sequence[ChildSpec], on_ready: Callable[[], None]) -> int:
        """Start each of `specs` once the one before serves, call `on_ready`, and watch. Main thread only.

        Returns 0 after a signal and a drain, 130 after a second signal. Raises ChildError when a child ends by
        itself or does not become ready, at the start or with no restart left; the others are ended first.
        """
        self._specs = specs
        with signals_to(self._inbox), adopting_orphans() as self._not_ours:
            try:
                for spec in specs:
                    self._start(spec)
                on_ready()
                self._is_serving = True
                while True:
                    self._tick()
                    self._restart()
            except StopRequested:
                self._display.draining()
                return self._drain()
            except HardStop:
                return HARD_STOP_EXIT_CODE
            except ChildError as error:
                # what failed is said first: ending the others may take a while
                self._display.failed(error)
                self._drain()
                raise
            finally:
                self._end_everything()

    def _start(self, spec: ChildSpec) -> None:
        child = self._spawn(spec)
        while not spec.is_ready():
            if child.age_s() > spec.start_timeout_s:
                raise ChildError(_late(spec), child.last_lines())
            self._tick()
        self._serves(spec)

    def _serves(self, spec: ChildSpec) -> None:
        self._display.ready(spec.name)
        self._watches[spec.name] = HangWatch(spec.answers or spec.is_ready, spec.hang_timeout_s)

    def _spawn(self, spec: ChildSpec) -> Child:
        self._display.starting(spec.name)
        child = Child(spec, self._environment, self._inbox)
        self._children.append(child)
        order = [spec.name for spec in self._specs]
        self._children.sort(key=lambda child: order.index(child.name))
        return child

    def _tick(self) -> None:
        """Handle what came in for one tick, then look for children that died or hang."""
        self._pump()
        for child in list(self._children):
            code = child.exit_code()
            if code is not None:
                self._lose(
                    child,
                    f"{child.name} ended with {describe_exit(code)}",
                    code if code == UNUSABLE_EXIT_CODE else 1,
                )
            elif child.name in self._watches and self._watches[child.name].has_hung:
                child.kill()
                self._lose(
                    child, f"{child.name} did not answer for {child.spec.hang_timeout_s:g} s and was killed"
                )

    def _lose(self, child: Child, reason: str, exit_code: int = 1) -> None:
        """Plan the restart of a child that has ended. Raises ChildError when there is none left."""
        lines = child.last_lines()
        # what it wrote last belongs before the news of its death
        for _ in range(self._inbox.qsize()):
            self._handle(self._inbox.get())
        self._children.remove(child)
        if (watch := self._watches.pop(child.name, None)) is not None:
            watch.stop()
        self._restarting.discard(child.name)
        if exit_code == UNUSABLE_EXIT_CODE and not self._is_serving and lines:
            # its last line says what it cannot use, and what to do
            reason, lines = f"{reason}: {lines[-1]}", lines[:-1]
        if not self._is_serving or not self._restarts.policy.limit:
            raise ChildError(reason, lines, exit_code)
        restart = self._restarts.grant(child.name)
        policy = self._restarts.policy
        within = f"{policy.limit} within {policy.window_s / 60:g} minutes"
        if restart is None:
            raise ChildError(f"{reason}, and was started again {within} already", lines, exit_code)
        self._display.lost(
            child.name,
            f"{reason}; lost: {child.spec.loss}; starting it again in {restart.delay_s:g} s "
            f"(restart {restart.number} of at most {within})",
            lines,
        )
        # what it started would hold its sockets and its memory
        end_orphans(self._ours())
        child.spec.clean()
        self._due[child.name] = time.monotonic() + restart.delay_s

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

    def _ours(self) -> set[int]:
        return self._not_ours | {child.pid for child in self._children}

    def _pump(self) -> None:
        deadline = time.monotonic() + self._tick_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = self._inbox.get(timeout=left)
            except Empty:
                return
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Signalled):
            raise HardStop if self._is_stopping else StopRequested
        self._show(message)

    def _show(self, line: Line) -> None:
        if line.is_stderr:
            self._display.line(line.child, line.text)
            return
        match parse_event(line.text):
            case Progress() as progress:
                self._display.progress(line.child, progress)
            case Status(text):
                self._display.status(line.child, text)
            case Output(text):
                self._display.line(line.child, text)

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
        """Give the children that may end clients' answers a moment for it; one more signal ends that too."""
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
                self._display.message(
                    f"{child.name} did not end in {child.spec.stop_timeout_s:g} s and was killed"
                )
                child.kill()
                return
            self._pump()
        if code := child.exit_code():
            self._display.message(f"{child.name} ended with {describe_exit(code)} while stopping")

    def _end_everything(self) -> None:
        for child in self._children:
            child.kill()
        self._children.clear()
        for watch in self._watches.values():
            watch.stop()
        end_orphans(self._ours())
        self._display.close()


def _late(spec: ChildSpec) -> str:
    return f"{spec.name} did not become ready in {spec.start_timeout_s:g} s"
