"""A replica's worker: a process that the kernel ends with the replica."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue

from carrel.errors import ReplicaStartError
from carrel.process.events import Output, Progress, parse_event
from carrel.process.noted_errors import NotedErrors
from carrel.serve.process import Child, ChildSpec, Line, Message, describe_exit

TICK_S = 0.1

log = logging.getLogger(__name__)


class WorkerProcess:
    """Started when constructed. `on_death` is called, on another thread, when it ends without having been stopped.

    One thread starts the child, reads it and waits for it: the kernel kills a child when the thread that started it
    ends, so that thread must live as long.
    """

    def __init__(
        self, spec: ChildSpec, environment: Mapping[str, str], on_death: Callable[[str], None]
    ) -> None:
        self._spec = spec
        self._environment = environment
        self._on_death = on_death
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._end = ""
        self._thread = threading.Thread(target=self._keep, name=spec.name, daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Return when it serves. Raises ReplicaStartError when it ends before, or takes too long."""
        deadline = time.monotonic() + self._spec.start_timeout_s
        while not self._spec.is_ready():
            if self._ended.wait(TICK_S):
                raise ReplicaStartError(self._end)
            if time.monotonic() > deadline:
                raise ReplicaStartError(
                    f"the {self._spec.name} did not become ready in {self._spec.start_timeout_s:g} s"
                )

    def stop(self) -> None:
        """SIGTERM, then SIGKILL when it does not end in the time that its spec gives."""
        self._stopping.set()
        # `on_death` may call this, on that very thread
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _keep(self) -> None:
        inbox: SimpleQueue[Message] = SimpleQueue()
        try:
            child = Child(self._spec, self._environment, inbox)
        except (OSError, RuntimeError) as error:
            self._end = f"the {self._spec.name} cannot be started: {error}"
            self._ended.set()
            return
        errors = NotedErrors(log, f"logging what the {self._spec.name} says")
        try:
            while child.exit_code() is None and not self._stopping.is_set():
                with errors.noting():
                    self._log(inbox)
        finally:
            child.stop()
            while not inbox.empty():
                self._log(inbox)
            lines = child.last_lines()
            self._end = f"the {child.name} ended with {describe_exit(child.exit_code() or 0)}: " + "\n".join(
                lines
            )
            self._ended.set()
        if not self._stopping.is_set():
            self._on_death(self._end)

    def _log(self, inbox: SimpleQueue[Message]) -> None:
        with contextlib.suppress(Empty):
            match inbox.get(timeout=TICK_S):
                case Line(is_stderr=True, text=text):
                    log.warning("%s: %s", self._spec.name, text)
                case Line(text=text):
                    self._log_event(text)

    def _log_event(self, text: str) -> None:
        match parse_event(text):
            case Progress(stage, done, total) if done == total:
                log.info("%s: %s", self._spec.name, stage)
            case Output(line):
                log.info("%s: %s", self._spec.name, line)
