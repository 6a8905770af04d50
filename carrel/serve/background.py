"""Processes that run while this one does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from carrel.errors import ChildError
from carrel.serve.display import Listener
from carrel.serve.process import ChildSpec
from carrel.serve.supervisor import Supervisor


class Background:
    """Supervises processes from construction until `stop`. None is restarted, or polled once it serves.

    The kernel ends a child when the thread that started it ends, so one thread starts, reads and ends them. `on_death`
    is called there when one ends by itself after all have served; it may call `stop`.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        environment: Mapping[str, str],
        listener: Listener,
        on_death: Callable[[ChildError], None] = lambda error: None,
    ) -> None:
        self._supervisor = Supervisor(listener, environment)
        self._specs = [replace(spec, hang_timeout_s=0.0) for spec in specs]
        self._on_death = on_death
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Return when all serve. Raises ChildError when one ends before, or takes too long."""
        self._has_started.wait()
        self.check()

    def check(self) -> None:
        """Raise ChildError when a process has ended by itself."""
        self._supervisor.check()

    def stop(self) -> None:
        """Let them drain, the last started first, and kill what does not end in the time that its spec gives."""
        self._supervisor.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _supervise(self) -> None:
        try:
            self._supervisor.supervise(self._specs, self._has_started.set)
        except ChildError as error:
            if self._has_started.is_set():
                self._on_death(error)
        finally:
            self._has_started.set()
