"""What lies on the disk: slabs by prefix hash, and the sessions that hold them. Names and sizes only, no files."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kv_store.disk.columns import ColumnTable, Places
from kv_store.disk.session_file import SavedSession

# What nobody used for so long goes first, whoever's it is.
UNUSED_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class Chain:
    """An owner's prefix, of a session or of none: the names of its slabs."""

    hashes: tuple[bytes, ...]
    owner: str
    session: str = ""


@dataclass(slots=True)
class Unneeded:
    """Whose files are to be removed: columns by hash, sessions by name."""

    columns: list[bytes] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)


class Catalog:
    """A column is one hash's slabs of all layers. Not thread-safe: the store's lock guards it.

    Room is made as in the arena: what nobody used for long goes first; then whoever has the most gives, columns of no
    session before the session that was used longest ago, whole, and never a pinned one. Who would have the most itself
    takes nothing from others, and a prefix of no session ends none of its owner's.

    column_bytes: of one column's file. max_bytes: of all columns. clock: monotonic, in seconds.
    """

    def __init__(
        self, column_bytes: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._column_bytes = column_bytes
        self._most_columns = max_bytes // column_bytes
        # of these as many as the disk has room for
        self._max_columns = self._most_columns
        self._columns = ColumnTable(clock)
        # the one that was used longest ago first
        self._sessions: OrderedDict[str, SavedSession] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return name in self._columns

    @property
    def num_bytes(self) -> int:
        return len(self._columns) * self._column_bytes

    @property
    def is_short(self) -> bool:
        """The disk has no room for all that may lie on it."""
        return self._max_columns < self._most_columns

    @property
    def has_room(self) -> bool:
        """For one more column."""
        return len(self._columns) < self._max_columns

    @property
    def sessions(self) -> tuple[str, ...]:
        return tuple(self._sessions)

    def held(self, session: str) -> tuple[bytes, ...]:
        """What a session holds here; nothing of one that is not here."""
        found = self._sessions.get(session)
        return () if found is None else found.hashes

    def count(self, hashes: Sequence[bytes]) -> int:
        """How many of a chain's first hashes are here."""
        return next((i for i, name in enumerate(hashes) if name not in self._columns), len(hashes))

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Those of a chain that are here were used now."""
        self._columns.renew(hashes)

    def add(self, name: bytes, before: bytes | None, owner: str, idle_seconds: float = 0.0) -> None:
        """idle_seconds: since its last use."""
        self._columns.add(name, before, owner, idle_seconds)

    def add_session(self, session: SavedSession) -> None:
        """It holds its hashes, which are here, instead of what it held before."""
        self.remove_session(session.name)
        self._sessions[session.name] = session
        self._columns.hold(session.hashes)

    def remove_session(self, name: str) -> None:
        """What it held stays. An unknown one is no error."""
        if (session := self._sessions.pop(name, None)) is not None:
            self._columns.hold(session.hashes, -1)

    def remove(self, name: bytes) -> Unneeded:
        """A column that cannot be read: sessions hold what comes before it."""
        unneeded = Unneeded([name])
        for session in tuple(self._sessions.values()):
            if name in session.hashes:
                self.remove_session(session.name)
                if kept := session.hashes[: session.hashes.index(name)]:
                    self.add_session(replace(session, hashes=kept))
                else:
                    unneeded.sessions.append(session.name)
        if name in self._columns:
            self._columns.remove([name])
        return unneeded

    def drop_session(self, name: str, hashes: Sequence[bytes]) -> Unneeded:
        """Forget a session, these hashes and its own, and what follows on them, but for what other sessions hold."""
        wanted, dropped = {*hashes, *self.held(name)}, set[bytes]()
        self.remove_session(name)
        for column in self._columns.newest_first():
            is_wanted = column.name in wanted or column.before in dropped
            if is_wanted and not self._columns.is_held(column):
                dropped.add(column.name)
        self._columns.remove(dropped)
        return Unneeded(list(dropped), [name])

    def make_room(self, is_pinned: Callable[[str], bool], chain: Chain | None = None) -> Unneeded:
        """What goes so that one more column of a chain finds room, as far as there is anything that may go; without a
        chain, so that all that is here has room. is_pinned: of a session's name."""
        unneeded = Unneeded()
        while (excess := len(self._columns) + (chain is not None) - self._max_columns) > 0:
            unheld = self._columns.unheld(chain.hashes if chain else ())
            unused = unheld[self._columns.are_unused(UNUSED_SECONDS, unheld)]
            if not (
                self._drop(unused, excess, unneeded) or self._give(unheld, excess, is_pinned, chain, unneeded)
            ):
                break
        return unneeded

    def fit(self, free_bytes: int) -> None:
        """The disk has room for so much beside what is here."""
        columns = len(self._columns) + free_bytes // self._column_bytes
        self._max_columns = min(self._most_columns, max(1, columns))

    def _give(
        self,
        unheld: Places,
        num_columns: int,
        is_pinned: Callable[[str], bool],
        chain: Chain | None,
        unneeded: Unneeded,
    ) -> bool:
        """Columns, at most so many, or a session of whoever has the most; False: there is nothing that may go."""
        owners, asking = self._columns.owners, None if chain is None else chain.owner
        for owner in owners.largest_first(asking, 1):
            if self._drop(unheld[owners.are_of(owner, unheld)], num_columns, unneeded):
                return True
            spared = asking if chain is not None and not chain.session else None
            for name, session in self._sessions.items():
                if session.owner != spared and not is_pinned(name) and self._may_end(session, owner):
                    self.remove_session(name)
                    unneeded.sessions.append(name)
                    return True
            if owner == asking:
                return False
        return False

    def _may_end(self, session: SavedSession, owner: str) -> bool:
        """Whether it is this owner's, or nobody used what it holds for long."""
        # No column of it was used later than its first.
        first = self._columns.places(session.hashes[:1])
        return session.owner == owner or bool(self._columns.are_unused(UNUSED_SECONDS, first).all())

    def _drop(self, places: Places, count: int, unneeded: Unneeded) -> bool:
        """The least recently used of these, at most so many; whether there was one."""
        names = self._columns.oldest(places, count)
        self._columns.remove(names)
        unneeded.columns += names
        return bool(names)
