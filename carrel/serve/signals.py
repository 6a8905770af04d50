"""Stop signals: calls of a function, or as Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_to(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at every stop signal instead of raising, until the block ends. It may interrupt any line."""
    with _handled(STOP_SIGNALS, lambda number, frame: stop()):
        yield


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C until the block ends. A second one must not end what the first has begun: `timeout` sends
    it twice."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _handled((signal.SIGTERM,), interrupt):
        yield


@contextmanager
def _handled(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in former.items():
            signal.signal(number, handler_before)
