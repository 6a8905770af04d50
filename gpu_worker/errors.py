"""Every error that the worker raises on purpose, and work for several of which one may fail.

WorkerError
├── ConfigError            start-up: a flag, a path or a device that cannot be used
├── ModelError             start-up: a model that is missing, corrupt or of an unknown family
├── RequestError           the caller's fault: `param` names the field
├── VersionMismatch        a caller of another version
├── CapacityError          no room: slots, seats or queue; the message says how much is missing
│   ├── ArenaFull          the store's arena is full: others may give way
│   └── NeverFits          the request does not fit even alone
├── StoreUnavailable       the KV store is gone or was restarted while the request ran
│   ├── PrefixLoading      more of a known prefix will be in the KV store's arena soon
│   ├── PrefixLost         only a known prefix went with it: the prompt can be computed anew
│   └── StoreSilent        the KV store does not answer now; what was asked of it may be asked again
├── SlowConsumer           the reader of a stream fell too far behind
├── InvalidLogits          the model gave NaN or infinity; names the request
└── EngineStopped          the engine drains, or has died of an unexpected error
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from carrel.process.options import OptionError

One = TypeVar("One")
Error = TypeVar("Error", bound="WorkerError")


class WorkerError(Exception):
    """Base of all; the text is fit to be shown to a user."""


class ConfigError(WorkerError, OptionError):
    """A start-up option that cannot be used."""


class ModelError(WorkerError):
    """A model that is missing, corrupt or of an unknown family."""


class RequestError(WorkerError):
    """A request field that is out of range; `param` is its name in the API, `code` a word for programs."""

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class VersionMismatch(WorkerError):
    """A caller of another version; the text names both and the remedy."""


class CapacityError(WorkerError):
    """No room for the request; the message says how much is missing and which option gives more."""


class ArenaFull(CapacityError):
    """The store's arena has no room by `missing_bytes`; another request may give way."""

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class NeverFits(CapacityError):
    """A request that does not fit even alone; it is refused before it starts."""


class StoreUnavailable(WorkerError):
    """The KV store is gone, or came back empty, while the request needed it."""


class PrefixLoading(StoreUnavailable):
    """The KV store is still reading a known prefix from its disk. Nothing was begun; the same may be asked again
    soon."""


class PrefixLost(StoreUnavailable):
    """Rows of a known prefix are gone, of a request that can do without the store: its prompt is computed anew."""


class StoreSilent(StoreUnavailable):
    """The KV store does not answer. Nothing is lost so far, and what was asked may be asked again once it does."""


class SlowConsumer(WorkerError):
    """The reader of a stream fell so far behind that its request was ended."""


class InvalidLogits(WorkerError):
    """Logits without a finite greatest value."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"The model produced invalid logits (NaN or infinity) for {request_id}.")


class EngineStopped(WorkerError):
    """The engine takes no more requests: it is draining, or an unexpected error ended it."""


def no_room(what: str, error: Exception) -> CapacityError:
    """The error for a prompt, a step, or one request's part of a step. Of PyTorch's error only the size that was asked
    for is told: the rest names devices and processes."""
    size = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    asked = f": {size[1]} more were asked for than the device has free" if size else ""
    return CapacityError(f"{what} does not fit beside what is there{asked}; leave more with --slot-memory")


def no_room_for_policy(policy: str, work: str, num_tokens: int) -> CapacityError:
    """The error for a policy's work on a prompt; work: a verb."""
    return CapacityError(
        f"no device memory is left for policy {policy!r} to {work} {num_tokens} tokens; leave more free with "
        "--slot-memory, or choose another policy"
    )


def run_each(
    ones: Iterable[One],
    operation: Callable[[One], None],
    failed: list[tuple[One, WorkerError]],
    short: list[tuple[One, ArenaFull]],
) -> list[One]:
    """Run an operation for each, of which one may fail without the others. Returns those that succeeded; the others go
    to `failed` or `short` with their error."""
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
    """Remove tracebacks, which would keep tensors alive that the others need."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
