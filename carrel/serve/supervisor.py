"""Starts the processes in order, watches them, and ends them in the reverse order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue

import psutil

from carrel.errors import ChildError
from carrel.serve.display.base import Display
from carrel.serve.events import Progress, Ready, Status, parse_event
from carrel.serve.process import Child, ChildSpec, Line, Message, Signalled, describe_exit
from carrel.serve.signals import signals_to
from carrel.serve.sweep import MARKER, find_descendants, sweep

TICK_S = 0.1
HARD_STOP_EXIT_CODE = 130


class StopRequested(Exception):
    """The first signal: drain."""


class HardStop(Exception):
    """The second signal: kill."""


class Supervisor:
    """Runs processes until one dies or a signal comes. Holds no process when `run` returns or raises.

    `run_mark` is put into each child's environment, by which grandchildren are found at the end.
    """

    def __init__(
        self, display: Display, environment: Mapping[str, str], run_mark: str, tick_s: float = TICK_S
    ) -> None:
        self._display = display
        self._environment = {**environment, MARKER: run_mark}
        self._run_mark = run_mark
        self._tick_s = tick_s
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._children: list[Child] = []
        self._grandchildren: list[psutil.Process] = []
        self._is_stopping = False

    def run(self, specs: Sequence[ChildSpec], on_ready: Callable[[], None]) -> int:
        """Start each of `specs` once the one before serves, call `on_ready`, and watch. Main thread only.

        Returns 0 after a signal and a drain, 130 after a second signal. Raises ChildError when a child ends
        by itself or does not become ready; the others are ended first.
        """
        with signals_to(self._inbox):
            try:
                for spec in specs:
                    self._start(spec)
                on_ready()
                while True:
                    self._tick()
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
        self._display.starting(spec.name)
        child = Child(spec, self._environment, self._inbox)
        self._children.append(child)
        while not spec.is_ready():
            if child.age_s() > spec.start_timeout_s:
                raise ChildError(
                    f"{spec.name} did not become ready in {spec.start_timeout_s:g} s", child.last_lines()
                )
            self._tick()
        self._display.ready(spec.name)

    def _tick(self) -> None:
        """Handle what came in for one tick, then look for dead children."""
        self._pump()
        for child in self._children:
            code = child.exit_code()
            if code is not None:
                lines = child.last_lines()
                self._children.remove(child)
                raise ChildError(
                    f"{child.name} ended with {describe_exit(code)}", lines, 2 if code == 2 else 1
                )

    def _pump(self) -> None:
        deadline = time.monotonic() + self._tick_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = self._inbox.get(timeout=left)
            except Empty:
                return
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
            case Ready():
                pass
            case other:
                self._display.line(line.child, other.text)

    def _drain(self) -> int:
        """SIGTERM to the last started first, each with its deadline, then SIGKILL."""
        self._is_stopping = True
        self._grandchildren = find_descendants(child.pid for child in self._children)
        try:
            for child in reversed(self._children):
                self._stop(child)
        except HardStop:
            return HARD_STOP_EXIT_CODE
        return 0

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
        self._grandchildren += find_descendants(child.pid for child in self._children)
        for child in self._children:
            child.kill()
        sweep(self._run_mark, self._grandchildren)
        self._children.clear()
        self._display.close()
