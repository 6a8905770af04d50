"""Child processes: each started in its own session, read line by line, ended by signal, with what outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from queue import Queue
from typing import IO

import psutil

UNUSABLE_EXIT_CODE = 2
TAIL_LINES = 20
MAX_LINE_CHARS = 65536
READ_TIMEOUT_S = 2.0
# becomes the child after asking the kernel for a signal (PR_SET_PDEATHSIG, 1) when its parent dies; exec keeps that
_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[3], sys.argv[3:])
"""
_LAUNCH = (sys.executable, "-I", "-S", "-c", _LAUNCHER)


@dataclass(frozen=True)
class ChildSpec:
    """How to start one process, how to know that it serves, and how long it may take to start and to stop.

    `loss` names what its death costs; `clean` removes the files that it leaves when it is killed. When it serves and
    `is_ready`, or `answers` where it has one, then fails for `hang_timeout_s`, it has hung; 0: it is not asked.
    `death_signal` is what it gets when the supervisor is killed. When a stop is hurried, it gets a second SIGTERM and
    `hurry_timeout_s` to end what clients are being sent.
    """

    name: str
    argv: tuple[str, ...]
    is_ready: Callable[[], bool]
    start_timeout_s: float
    stop_timeout_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    loss: str = "nothing"
    clean: Callable[[], object] = lambda: None
    hang_timeout_s: float = 0.0
    answers: Callable[[], bool] | None = None
    death_signal: int = signal.SIGKILL
    hurry_timeout_s: float = 0.0


@dataclass(frozen=True)
class Line:
    """A line that a child wrote."""

    child: str
    is_stderr: bool
    text: str


class Child(subprocess.Popen[str]):
    """A running process in a session of its own, ended by the kernel when the supervisor dies.

    Must be made on a thread that lives as long, such as the main one: the kernel's parent-death signal comes when the
    thread that started the child ends. A launcher asks for it and not a `preexec_fn`, with which Python would fork:
    gRPC, which the supervisor uses, aborts in a forked child. `spec.argv[0]` is an absolute path.
    Its lines go to `inbox`; the caller ends it with `terminate`, which asks it to drain, and `kill`.
    """

    def __init__(self, spec: ChildSpec, environment: Mapping[str, str], inbox: Queue[Line]) -> None:
        self.spec = spec
        self.name = spec.name
        self.stderr_tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.started_at = time.monotonic()
        super().__init__(
            (*_LAUNCH, str(os.getpid()), str(int(spec.death_signal)), *spec.argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**environment, **spec.environment},
            start_new_session=True,
        )
        assert self.stdout is not None
        assert self.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self.stdout, False, inbox), daemon=True),
            threading.Thread(target=self._read, args=(self.stderr, True, inbox), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[str], is_stderr: bool, inbox: Queue[Line]) -> None:
        while line := stream.readline(MAX_LINE_CHARS):
            text = line.rstrip("\n")
            if is_stderr:
                self.stderr_tail.append(text)
            inbox.put(Line(self.spec.name, is_stderr, text))

    def age_s(self) -> float:
        return time.monotonic() - self.started_at

    def last_lines(self) -> tuple[str, ...]:
        """The last lines of stderr; all of them when it has ended."""
        if self.poll() is not None:
            self.finish_reading()
        return tuple(self.stderr_tail)

    def finish_reading(self) -> None:
        """Return when all that it wrote is in `inbox`. It has ended."""
        for reader in self._readers:
            # not for ever: a grandchild may hold the pipe open
            reader.join(timeout=READ_TIMEOUT_S)

    def kill(self) -> None:
        """End its whole process group now."""
        if self.poll() is None:
            # not reaped yet, so the group's id is still ours
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()


def describe_exit(code: int) -> str:
    """ "code 1" or "signal SIGKILL"."""
    if code >= 0:
        return f"code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


_PR_SET_CHILD_SUBREAPER = 36
ROUNDS = 5
TIMEOUT_S = 5.0


@contextlib.contextmanager
def adopting_orphans() -> Iterator[set[int]]:
    """Let every process below us whose parent ends become our child until the block ends. Yields the ids of the
    children that we have already."""
    _set_subreaper(1)
    try:
        yield {process.pid for process in psutil.Process().children()}
    finally:
        _set_subreaper(0)


def end_orphans(own: Collection[int]) -> None:
    """SIGKILL and reap our children but `own`, with all below them. Several rounds: what is killed may still fork."""
    for _ in range(ROUNDS):
        orphans = [process for process in psutil.Process().children() if process.pid not in own]
        if not orphans:
            return
        for orphan in orphans:
            with contextlib.suppress(psutil.Error):
                for process in (*orphan.children(recursive=True), orphan):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
        # our children: waiting reaps them
        psutil.wait_procs(orphans, timeout=TIMEOUT_S)


def _set_subreaper(value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
