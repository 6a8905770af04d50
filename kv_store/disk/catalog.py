"""The columns on the disk, by name; the least recently used ones leave it first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from kv_store.disk.files import Column, TierFiles
from kv_store.sessions import SessionDirectory

# What a session keeps that was unused for so long may leave the disk for a prefix of no session.
UNUSED_SECONDS = 86400.0


class Catalog:
    """A predecessor in a chain is never older than what follows it. Not thread-safe: the store's lock guards it.

    files: of the same layout. max_bytes: of all columns.
    """

    def __init__(self, files: TierFiles, sessions: SessionDirectory, max_bytes: int) -> None:
        self.files = files
        self._sessions = sessions
        self._max_columns = max_bytes // files.column_bytes
        # name to the name before it, the least recently used first
        self._columns: OrderedDict[bytes, bytes | None] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return name in self._columns

    @property
    def num_bytes(self) -> int:
        return len(self._columns) * self.files.column_bytes

    @property
    def has_room(self) -> bool:
        """Return whether one more column fits."""
        return len(self._columns) < self._max_columns

    def fill(self, found: Sequence[Column]) -> None:
        """List what an earlier store left."""
        columns = sorted(found, key=lambda column: column.used_at)
        self._columns = OrderedDict((column.name, column.before) for column in columns)
        for column in columns:
            # What precedes a column was used whenever it was, whatever the times of the files are.
            self.touch(self._path(column.name))

    def chain(self, last: bytes) -> tuple[bytes, ...]:
        """The chain that ends with this column; empty where a part of it is missing."""
        path = self._path(last)
        return path if path and self._columns[path[0]] is None else ()

    def clear(self) -> None:
        """Forget all: the arena has another layout."""
        self._columns.clear()

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Note that a chain is used now, as far as it is here."""
        for name in reversed(hashes):
            if name in self._columns:
                self._columns.move_to_end(name)

    def add(self, column: Column) -> None:
        self._columns[column.name] = column.before

    def lose(self, name: bytes) -> None:
        """Forget a column that cannot be read; sessions keep what precedes it."""
        self._columns.pop(name, None)
        self._sessions.lose_kept(name)

    def drop(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Forget these columns and those that follow on them, except what sessions keep. Returns which."""
        wanted, dropped = set(hashes), dict[bytes, None]()
        for name, before in reversed(self._columns.items()):
            if (name in wanted or before in dropped) and not self._sessions.num_keeping[name]:
                dropped[name] = None
        for name in dropped:
            del self._columns[name]
        return list(dropped)

    def make_room(self, chain: Sequence[bytes] = (), ends_sessions: bool = True) -> list[bytes]:
        """Forget columns until one more of a chain fits, or without a chain all that are here, as far as any may go:
        first those that no session keeps, then what the session keeps that was unused for longest; without
        `ends_sessions` only if that was for a day. Returns which."""
        spared, gone = set(chain), list[bytes]()
        while (excess := len(self._columns) + bool(chain) - self._max_columns) > 0:
            num_keeping = self._sessions.num_keeping
            unkept = (name for name in self._columns if not num_keeping[name] and name not in spared)
            names = list(islice(unkept, excess))
            for name in names:
                del self._columns[name]
            gone += names
            if not names and not self._sessions.lose_oldest_kept(0.0 if ends_sessions else UNUSED_SECONDS):
                break
        return gone

    def _path(self, last: bytes) -> tuple[bytes, ...]:
        """A column behind those before it, as far as they are here."""
        path, name = dict[bytes, None](), last
        while name in self._columns and name not in path:
            path[name] = None
            name = self._columns[name] or b""
        return tuple(reversed(path))
