"""A store and a worker for this run only, as processes on Unix sockets in a private folder."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType

from carrel.errors import ChildError
from carrel.serve.children import STORE_START_S, WORKER_START_S, child_environment
from carrel.serve.process import Child, ChildSpec, Line, Message, describe_exit
from carrel.serve.readiness import grpc_serving
from carrel.serve.runtime_dir import runtime_dir
from carrel.serve.sweep import MARKER, find_descendants, sweep

POLL_S = 0.2
STOP_S = 15.0
STORE_RUNTIMES = ("process", "ray")


@dataclass(frozen=True)
class LocalOptions:
    """How to start the two. None leaves a choice to the process. reuses_prefixes: prompts share the
    prefixes of earlier ones."""

    model: str
    device: str
    hot_cache: str
    max_model_len: int
    store_runtime: str
    arena_bytes: int | None = None
    dtype: str | None = None
    max_num_seqs: int | None = None
    threads: int | None = None
    slot_memory: int | None = None
    trainers: int | None = None
    index_device: str | None = None
    calibration: Path | None = None
    reuses_prefixes: bool = True


@contextmanager
def local_worker(options: LocalOptions, notice: Callable[[str], None]) -> Iterator[str]:
    """The address of a worker that serves while the block runs. Main thread only.

    SIGTERM ends the block as Ctrl-C does. Raises ChildError when a process does not come up.
    """
    with runtime_dir() as folder, sigterm_as_interrupt(), _running(specs(options, folder), folder, notice):
        yield f"unix:{folder}/gpu_worker.sock"


def specs(options: LocalOptions, folder: Path) -> tuple[ChildSpec, ChildSpec]:
    """The commands of store and worker, in the order in which they start."""
    store, worker = folder / "kv_store.sock", folder / "gpu_worker.sock"
    store_arguments = {
        "--listen": f"unix:{store}",
        "--arena-bytes": options.arena_bytes,
        "--runtime": options.store_runtime,
        "--trainers": options.trainers,
    }
    worker_arguments = {
        "--listen": f"unix:{worker}",
        "--store": f"unix:{store}",
        "--device": options.device,
        "--hot-cache": options.hot_cache,
        "--max-model-len": options.max_model_len,
        "--dtype": options.dtype,
        "--max-num-seqs": options.max_num_seqs,
        "--threads": options.threads,
        "--slot-memory": options.slot_memory,
        "--index-device": options.index_device,
        "--calibration": options.calibration,
        "--prefix-cache": None if options.reuses_prefixes else "off",
    }
    ray = {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    return (
        ChildSpec(
            "store", _command("kv_store", store_arguments), grpc_serving(store), STORE_START_S, STOP_S, ray
        ),
        ChildSpec(
            "worker",
            _command("gpu_worker", worker_arguments, options.model),
            grpc_serving(worker),
            WORKER_START_S,
            STOP_S,
        ),
    )


def _command(module: str, arguments: Mapping[str, object], *positional: str) -> tuple[str, ...]:
    flags = [text for name, value in arguments.items() if value is not None for text in (name, str(value))]
    return (sys.executable, "-P", "-m", module, *positional, *flags, "--json-events")


@contextmanager
def _running(wanted: Sequence[ChildSpec], folder: Path, notice: Callable[[str], None]) -> Iterator[None]:
    # what configures a server by environment is not meant for a measurement
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
    environment = {**child_environment(environment), MARKER: str(folder)}
    inbox: SimpleQueue[Message] = SimpleQueue()
    children: list[Child] = []
    try:
        for spec in wanted:
            notice(f"starting the {spec.name}")
            children.append(Child(spec, environment, inbox))
            _await_ready(children)
        try:
            yield
        except BaseException:
            # whatever failed in the block, a dead process is the better explanation
            _require_alive(children)
            raise
    finally:
        grandchildren = find_descendants(child.pid for child in children)
        for child in reversed(children):
            _stop(child)
        sweep(str(folder), grandchildren)
        _print_errors(inbox)


def _await_ready(children: Sequence[Child]) -> None:
    newest = children[-1]
    while not newest.spec.is_ready():
        _require_alive(children)
        if newest.age_s() > newest.spec.start_timeout_s:
            message = f"{newest.name} did not become ready in {newest.spec.start_timeout_s:g} s"
            raise ChildError(message, newest.last_lines())
        time.sleep(POLL_S)


def _require_alive(children: Sequence[Child]) -> None:
    for child in children:
        code = child.exit_code()
        if code is not None:
            lines = child.last_lines()
            message = " ".join([f"{child.name} ended with {describe_exit(code)};", *lines[-3:]])
            raise ChildError(message, lines, 2 if code == 2 else 1)


def _stop(child: Child) -> None:
    child.terminate()
    deadline = time.monotonic() + child.spec.stop_timeout_s
    while child.exit_code() is None and time.monotonic() < deadline:
        time.sleep(POLL_S / 4)
    child.kill()


def _print_errors(inbox: SimpleQueue[Message]) -> None:
    while True:
        try:
            message = inbox.get_nowait()
        except Empty:
            return
        if isinstance(message, Line) and message.is_stderr:
            print(f"{message.child}: {message.text}", file=sys.stderr)


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
