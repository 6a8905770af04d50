"""A store and a worker for this run only, as processes on Unix sockets in a private folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

from carrel.errors import ChildError
from carrel.serve.children import Endpoints, child_environment, store_spec, worker_spec
from carrel.serve.process import Child, ChildSpec, Line, Message, adopting_orphans, describe_exit, end_orphans
from carrel.serve.runtime_dir import runtime_dir
from carrel.serve.signals import sigterm_as_interrupt

POLL_S = 0.2


@contextmanager
def local_worker(model: str, texts: Mapping[str, str], notice: Callable[[str], None]) -> Iterator[str]:
    """The address of a worker that serves while the block runs. Main thread only.

    texts: what options of the store and the worker are given, by field. SIGTERM ends the block as Ctrl-C does. Raises
    OptionError, and ChildError when a process does not come up.
    """
    with runtime_dir() as folder, sigterm_as_interrupt(), adopting_orphans() as own:
        endpoints = Endpoints(folder, "localhost", 0, 0)
        specs = (store_spec(texts, endpoints), worker_spec(model, texts, endpoints))
        try:
            with _running(specs, notice):
                yield f"unix:{endpoints.worker_socket}"
        finally:
            end_orphans(own)


@contextmanager
def local_store(texts: Mapping[str, str], notice: Callable[[str], None]) -> Iterator[Endpoints]:
    """A store alone, and where it listens; else as `local_worker`."""
    with runtime_dir() as folder, sigterm_as_interrupt(), adopting_orphans() as own:
        endpoints = Endpoints(folder, "localhost", 0, 0)
        try:
            with _running((store_spec(texts, endpoints),), notice):
                yield endpoints
        finally:
            end_orphans(own)


def own_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The children's: what configures a server by environment is not meant for a measurement."""
    return child_environment(
        {key: value for key, value in environment.items() if not key.startswith("CARREL_")}
    )


@contextmanager
def _running(wanted: Sequence[ChildSpec], notice: Callable[[str], None]) -> Iterator[None]:
    environment = own_environment(os.environ)
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
        for child in reversed(children):
            child.stop()
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


def _print_errors(inbox: SimpleQueue[Message]) -> None:
    while not inbox.empty():
        message = inbox.get_nowait()
        if isinstance(message, Line) and message.is_stderr:
            print(f"{message.child}: {message.text}", file=sys.stderr)
