"""SIGINT, SIGTERM and SIGHUP as messages."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from carrel.serve.process import Message, Signalled

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_to(inbox: SimpleQueue[Message]) -> Iterator[None]:
    """Put every stop signal into `inbox` instead of raising; the former handlers come back at the end.

    SimpleQueue.put may be called from a handler that interrupts `get`; Queue.put may not.
    """

    def put(number: int, frame: FrameType | None) -> None:
        inbox.put(Signalled(number))

    former = {number: signal.signal(number, put) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM is as Ctrl-C while the block runs. A second one must not end what the first has begun: `timeout` sends
    it twice."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
