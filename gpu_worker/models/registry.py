"""A name → object table that refuses duplicates and lists the valid names when asked for an unknown one."""

from __future__ import annotations

from typing import Generic, TypeVar

from gpu_worker.errors import ModelError

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries of one kind by name; `kind` names them in error messages."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> None:
        """Add an entry; a name already taken raises ValueError (a mistake in our code, not in a model)."""
        if name in self._entries:
            raise ValueError(f"{self._kind} {name!r} is registered twice")
        self._entries[name] = entry

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._entries))

    def get(self, name: str) -> T:
        """The entry of this name; ModelError lists the valid ones otherwise."""
        if name not in self._entries:
            raise ModelError(f"{self._kind} {name!r} is not supported; supported: {', '.join(self.names())}")
        return self._entries[name]
