"""A store and a worker for this run only, as processes on Unix sockets in a private folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from carrel.serve.background import Background
from carrel.serve.children import child_environment, store_spec, worker_spec
from carrel.serve.display import Listener
from carrel.serve.endpoints import Endpoints, runtime_dir
from carrel.serve.process import ChildSpec, adopting_orphans, end_orphans
from carrel.serve.signals import sigterm_as_interrupt


@contextmanager
def local_worker(model: str, texts: Mapping[str, str], notice: Callable[[str], None]) -> Iterator[str]:
    """The address of a worker that serves while the block runs. Main thread only.

    texts: options of the store and the worker, by field. SIGTERM ends the block as Ctrl-C does. Raises OptionError, and
    ChildError when a process does not come up.
    """

    def specs(endpoints: Endpoints) -> Sequence[ChildSpec]:
        return store_spec(texts, endpoints), worker_spec(model, texts, endpoints)

    with _running(specs, notice) as endpoints:
        yield f"unix:{endpoints.worker_socket}"


@contextmanager
def local_store(texts: Mapping[str, str], notice: Callable[[str], None]) -> Iterator[Endpoints]:
    """A store alone, and where it listens; else as `local_worker`."""
    with _running(lambda endpoints: (store_spec(texts, endpoints),), notice) as endpoints:
        yield endpoints


def own_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The children's: what configures a server by environment is not meant for a measurement."""
    return child_environment(
        {key: value for key, value in environment.items() if not key.startswith("CARREL_")}
    )


class _Notes(Listener):
    """Notes that a process starts, and prints what all wrote at the end, behind the tables of a measurement."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._lines: list[str] = []

    def starting(self, child: str) -> None:
        self._notice(f"starting the {child}")

    def line(self, child: str, text: str) -> None:
        self._lines.append(f"{child}: {text}")

    def close(self) -> None:
        for line in self._lines:
            print(line, file=sys.stderr)


@contextmanager
def _running(
    specs: Callable[[Endpoints], Sequence[ChildSpec]], notice: Callable[[str], None]
) -> Iterator[Endpoints]:
    with runtime_dir() as folder, sigterm_as_interrupt(), adopting_orphans() as own:
        endpoints = Endpoints(folder, "localhost", 0, 0)
        running = Background(specs(endpoints), own_environment(os.environ), _Notes(notice))
        try:
            running.wait_ready()
            yield endpoints
        except Exception:
            # whatever failed in the block, a dead process is the better explanation
            running.check()
            raise
        finally:
            running.stop()
            end_orphans(own)
