"""Work that is done for several requests, of which one may fail without the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from gpu_worker.errors import ArenaFull, WorkerError

One = TypeVar("One")
Error = TypeVar("Error", bound=WorkerError)


def each(
    ones: Iterable[One],
    operation: Callable[[One], None],
    failed: list[tuple[One, WorkerError]],
    short: list[tuple[One, ArenaFull]],
) -> list[One]:
    """Those whose operation succeeded; the others go to `failed` or `short` with their error."""
    kept = []
    for one in ones:
        try:
            operation(one)
            kept.append(one)
        except ArenaFull as error:
            short.append((one, _bare(error)))
        except WorkerError as error:
            failed.append((one, _bare(error)))
    return kept


def _bare(error: Error) -> Error:
    """Without tracebacks, which would keep tensors alive that the others need."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
