"""`python -m kv_store`: the store's process. Ends with 0 on SIGTERM or when its parent is gone, 1 when the store
dies, 2 when its configuration cannot be used."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TextIO

from carrel.process.events import ProcessEvents
from carrel.process.logs import log_to_stderr
from carrel.process.options import OptionError
from kv_store.client.errors import StoreError
from kv_store.config import StoreConfig, parse_config
from kv_store.runtimes import load_runtime

_WATCH_SECONDS = 0.3


def _stop_on_signals(stop: SimpleQueue[int]) -> None:
    """SimpleQueue.put may be called from a handler that interrupts `get`; Event.set waits there for ever."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop.put(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def _is_told(stop: SimpleQueue[int]) -> bool:
    """Return whether a signal came, or comes within a moment."""
    try:
        stop.get(timeout=_WATCH_SECONDS)
    except Empty:
        return False
    return True


def _take_stdout() -> TextIO:
    """A stream to our stdout; whatever else is printed (Ray does so at will) goes to stderr from now on."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stream


def run(config: StoreConfig, events: ProcessEvents) -> None:
    """Serve until a signal or the parent's end. Raises ConfigError at start, StoreError when the store dies."""
    parent = os.getppid()
    runtime_class = load_runtime(config.runtime)
    stop: SimpleQueue[int] = SimpleQueue()
    _stop_on_signals(stop)
    try:
        runtime = runtime_class(config, events)
    except SystemExit:
        # Ray's own SIGTERM handler, which it sets while it starts; everything is unwound by now.
        return
    try:
        _stop_on_signals(stop)
        events.ready(config.listen)
        # Compared, not signalled: PR_SET_PDEATHSIG fires when the thread that started us ends, not the process.
        while os.getppid() == parent and not _is_told(stop):
            runtime.watch()
    finally:
        if os.getppid() == parent:
            runtime.close()
        else:
            # the worker is dead too
            runtime.abandon()


def main(arguments: Sequence[str]) -> int:
    try:
        config = parse_config(arguments)
        log_to_stderr("kv_store", config.log_level, config.log_format)
        out = _take_stdout() if config.json_events else None
        run(config, ProcessEvents("kv_store", config.json_events, out, config.log_format))
    except OptionError as error:
        print(f"kv_store: {error}", file=sys.stderr)
        return error.exit_code
    except StoreError as error:
        print(f"kv_store: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
