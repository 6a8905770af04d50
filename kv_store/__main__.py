"""`python -m kv_store`: the store's process. Ends with 0 on SIGTERM or when its parent is gone, 1 when the store
dies, 2 when its configuration cannot be used."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TextIO

from carrel.process.events import ProcessEvents
from kv_store.config import RUNTIMES, StoreConfig, idle_cores
from kv_store.errors import ConfigError, KVStoreError
from kv_store.memory import available_bytes
from kv_store.runtimes import load_runtime

_WATCH_SECONDS = 0.3


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kv_store",
        description="Carrel's KV store. Every option but --json-events can be set as CARREL_NAME too; options win.",
    )

    def option(
        flag: str, parse: Callable[[str], object], default: object, help: str = "", **more: Any
    ) -> None:
        # a text is parsed like a value on the command line; an empty variable is none
        text = environment.get("CARREL_" + flag.removeprefix("--").replace("-", "_").upper())
        parser.add_argument(flag, type=parse, default=text or default, help=help, **more)

    option("--listen", str, None, "unix:PATH or HOST:PORT (loopback)", metavar="ADDRESS")
    option("--arena-bytes", int, None, "host memory for rows; half of what is free", metavar="N")
    option("--slab-bytes", int, 2 << 20, metavar="N")
    option("--arena-socket", str, "", "arena.sock beside the Unix socket", metavar="PATH")
    option("--trainers", int, idle_cores(), "one core each", metavar="N")
    option("--runtime", str, "ray", choices=RUNTIMES)
    option("--max-restarts", int, 0, "by Ray, when the store dies", metavar="N")
    option("--lease-seconds", float, 30.0, metavar="S")
    option("--default-iterations", int, 10, metavar="N")
    option("--max-points-per-centroid", int, 128, "0: all rows", metavar="N")
    option("--store-token-file", str, "", "holds what every call must show", metavar="PATH")
    # A secret: never on a command line.
    parser.set_defaults(store_token=environment.get("CARREL_STORE_TOKEN", ""))
    parser.add_argument("--json-events", action="store_true", help="one JSON object a line on stdout")
    return parser


def _config(options: argparse.Namespace) -> StoreConfig:
    if not options.listen:
        raise ConfigError("--listen ADDRESS is missing: give it, or set CARREL_LISTEN")
    arena_bytes = options.arena_bytes
    if arena_bytes is None:
        arena_bytes = available_bytes() // 2 // max(1, options.slab_bytes) * options.slab_bytes
    return StoreConfig(
        listen=options.listen,
        arena_bytes=arena_bytes,
        slab_bytes=options.slab_bytes,
        arena_socket=options.arena_socket,
        num_trainers=options.trainers,
        runtime=options.runtime,
        max_restarts=options.max_restarts,
        lease_seconds=options.lease_seconds,
        default_iterations=options.default_iterations,
        max_points_per_centroid=options.max_points_per_centroid,
        store_token=options.store_token,
        store_token_file=options.store_token_file,
    )


def _stop_on_signals(stop: threading.Event) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def _take_stdout() -> TextIO:
    """A stream to our stdout; whatever else is printed (Ray does so at will) goes to stderr from now on."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stream


def run(config: StoreConfig, events: ProcessEvents) -> None:
    """Serve until a signal or the parent's end. Raises ConfigError at start, KVStoreError when the store dies."""
    parent = os.getppid()
    runtime_class = load_runtime(config.runtime)
    stop = threading.Event()
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
        while os.getppid() == parent and not stop.wait(_WATCH_SECONDS):
            runtime.watch()
    finally:
        runtime.close()


def main(arguments: list[str] | None = None) -> int:
    options = _parser(os.environ).parse_args(arguments)
    logging.basicConfig(
        stream=sys.stderr, format="kv_store: %(levelname)s: %(message)s", level=logging.WARNING
    )
    events = ProcessEvents("kv_store", options.json_events, _take_stdout() if options.json_events else None)
    try:
        run(_config(options), events)
    except ConfigError as exc:
        print(f"kv_store: {exc}", file=sys.stderr)
        return 2
    except KVStoreError as exc:
        print(f"kv_store: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
