"""`python -m gpu_worker MODEL ...`: one worker process."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from carrel.process.events import ProcessEvents
from carrel.process.logs import log_to_stderr
from carrel.process.options import OptionError
from carrel.process.tracing import make_tracer
from gpu_worker.config import WorkerConfig, parse_arguments
from gpu_worker.errors import ModelError, StoreUnavailable
from gpu_worker.grammar import Grammars
from gpu_worker.service.engine_thread import Engine
from gpu_worker.service.lifecycle import Lifecycle, Preparation
from gpu_worker.service.server import prepare_address
from gpu_worker.service.store_wait import wait_for_store
from gpu_worker.store.sessions import Sessions
from gpu_worker.store.traces import Traces

EXIT_UNUSABLE = 2
PR_SET_PDEATHSIG = 1

# For so long the event loop keeps Python's lock while the engine's thread waits for it, which it may some times a step.
# With Python's own 5 ms one step in a hundred beside 100,000 log probabilities took 18 ms instead of 6.
SWITCH_SECONDS = 0.001


def main(argv: Sequence[str]) -> int:
    """Serve until a signal or the engine's death; returns the exit status that docs/architecture.md names."""
    _die_with_parent()
    os.umask(0o077)
    _leave_on_signals()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        config = parse_arguments(argv)
        log_to_stderr("gpu_worker", config.log_level, config.log_format)
        events = ProcessEvents("gpu_worker", config.json_events, log_format=config.log_format)
        prepare_address(config.listen)
        tracer = make_tracer("gpu_worker", config.otlp_endpoint)
        traces = Traces(tracer)
        engine, sessions, grammars, prepare = _build(config, events, traces)
        try:
            return asyncio.run(_serve(config, engine, sessions, grammars, prepare, events, traces))
        finally:
            tracer.close()
    except (OptionError, ModelError, StoreUnavailable) as error:
        print(f"gpu_worker: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_UNUSABLE


def _build(
    config: WorkerConfig, events: ProcessEvents, traces: Traces
) -> tuple[Engine, Sessions, Grammars, Preparation | None]:
    events.progress("connect to the KV store", 0, 1)
    wait_for_store(config.store, config.store_timeout_s, config.store_token, config.store_root)
    events.progress("connect to the KV store", 1, 1)
    # imported late: --help and a missing store are quick to report
    import torch

    from gpu_worker.startup.build import build_engine
    from gpu_worker.startup.warm.warmup import WarmUp

    torch.set_num_threads(config.threads or available_cores())
    worker = build_engine(config, events.progress, traces)
    engine, sessions = worker.engine, worker.runner.offloader.sessions
    grammars = Grammars(engine.info.model, engine.info.eos_token_ids)
    if config.no_warmup:
        return engine, sessions, grammars, None
    warm_up = WarmUp(
        worker, config.prefill_chunk, partial(events.progress, "warm up"), policies=config.allowed_policies
    )

    def prepare(is_stopped: Callable[[], bool]) -> None:
        warm_up.run(is_stopped)
        grammars.prepare()

    return engine, sessions, grammars, prepare


async def _serve(
    config: WorkerConfig,
    engine: Engine,
    sessions: Sessions,
    grammars: Grammars,
    prepare: Preparation | None,
    events: ProcessEvents,
    traces: Traces,
) -> int:
    lifecycle = Lifecycle(
        engine,
        sessions,
        config.listen,
        config.max_queue,
        config.shutdown_timeout_s,
        events,
        prepare=prepare,
        hang_timeout_seconds=config.hang_timeout_s,
        grammars=grammars,
        identity=config.identity,
        traces=traces,
    )
    seen: set[int] = set()

    def stop(number: int) -> None:
        # counted by kind: a terminal's SIGINT and a supervisor's SIGTERM are one wish
        if number in seen:
            os._exit(128 + number)
        seen.add(number)
        lifecycle.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return await lifecycle.run()


def available_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: its affinity, cut to the container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _leave_on_signals() -> None:
    """End with 0 on a signal until the loop has handlers of its own: nothing is served, nothing drains.

    A plain handler would wait for the main thread, which may be deep in a load; the wake-up descriptor is
    written at once whatever it does. asyncio takes that descriptor over with its first signal handler.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)

    def watch() -> None:
        os.read(reader, 1)
        os._exit(0)

    threading.Thread(target=watch, name="signals", daemon=True).start()


def _die_with_parent() -> None:
    parent = os.getppid()
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # the parent may have died before the call
    if os.getppid() != parent:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
