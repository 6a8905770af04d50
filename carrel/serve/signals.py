"""Stop signals: calls of a function, or as Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handling(numbers: tuple[signal.Signals, ...], act: Callable[[], None]) -> Iterator[None]:
    """Call `act` at each of these signals until the block ends. It may interrupt any line. Main thread only."""
    former = {number: signal.signal(number, lambda number, frame: act()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def sigterm_as_interrupt() -> AbstractContextManager[None]:
    """Treat SIGTERM as Ctrl-C until the block ends. A second one must not end what the first has begun: `timeout` sends
    it twice."""

    def interrupt() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    return handling((signal.SIGTERM,), interrupt)
