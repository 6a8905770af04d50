"""What lies on the disk: slabs by prefix hash, and the sessions that hold them. Names and sizes only, no files."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from kv_store.disk.session_file import SavedSession


@dataclass(frozen=True, slots=True)
class Chain:
    """A prefix, of a session or of none: the names of its slabs."""

    hashes: tuple[bytes, ...]
    session: str = ""


@dataclass(slots=True)
class Unneeded:
    """Whose files are to be removed: columns by hash, sessions by name."""

    columns: list[bytes] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)


class Catalog:
    """A column is one hash's slabs of all layers; a predecessor in a chain is never older than what follows it. Columns
    of no session make room first, then, for a session, the one that was used longest ago, whole; pinned ones never. Not
    thread-safe: the store's lock guards it.

    column_bytes: of one column's file. max_bytes: of all columns.
    """

    def __init__(self, column_bytes: int, max_bytes: int) -> None:
        self._column_bytes = column_bytes
        self._most_columns = max_bytes // column_bytes
        # of these as many as the disk has room for
        self._max_columns = self._most_columns
        # hash -> the one before it; the least recently used first
        self._columns: OrderedDict[bytes, bytes | None] = OrderedDict()
        # the one that was used longest ago first
        self._sessions: OrderedDict[str, SavedSession] = OrderedDict()
        # hash -> how many sessions hold it
        self._holders: Counter[bytes] = Counter()

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
        for name in reversed(hashes):
            if name in self._columns:
                self._columns.move_to_end(name)

    def add(self, name: bytes, before: bytes | None) -> None:
        self._columns[name] = before

    def add_session(self, session: SavedSession) -> None:
        """It holds its hashes, which are here, instead of what it held before."""
        self.remove_session(session.name)
        self._sessions[session.name] = session
        self._holders.update(session.hashes)

    def remove_session(self, name: str) -> None:
        """What it held stays. An unknown one is no error."""
        if (session := self._sessions.pop(name, None)) is not None:
            self._holders.subtract(session.hashes)
            for column in session.hashes:
                # Counts of what is gone would pile up.
                if not self._holders[column]:
                    del self._holders[column]

    def remove(self, name: bytes) -> Unneeded:
        """A column that cannot be read: sessions hold what comes before it."""
        self._columns.pop(name, None)
        unneeded = Unneeded([name])
        for session in tuple(self._sessions.values()):
            if name in session.hashes:
                self.remove_session(session.name)
                if kept := session.hashes[: session.hashes.index(name)]:
                    self.add_session(replace(session, hashes=kept))
                else:
                    unneeded.sessions.append(session.name)
        return unneeded

    def drop_session(self, name: str, hashes: Sequence[bytes]) -> Unneeded:
        """Forget a session, these hashes and its own, and what follows on them, but for what other sessions hold."""
        wanted, dropped = {*hashes, *self.held(name)}, set[bytes]()
        self.remove_session(name)
        for column, before in reversed(self._columns.items()):
            if (column in wanted or before in dropped) and not self._holders[column]:
                dropped.add(column)
        for column in dropped:
            del self._columns[column]
        return Unneeded(list(dropped), [name])

    def make_room(self, is_pinned: Callable[[str], bool], chain: Chain | None = None) -> Unneeded:
        """What goes so that one more column of a chain finds room, as far as there is anything that may go; without a
        chain, so that all that is here has room. is_pinned: of a session's name."""
        unneeded, kept = Unneeded(), set(chain.hashes) if chain else set[bytes]()
        may_end_sessions = chain is None or bool(chain.session)
        while (excess := len(self._columns) + (chain is not None) - self._max_columns) > 0:
            unheld = (name for name in self._columns if not self._holders[name] and name not in kept)
            free = list(islice(unheld, excess))
            for name in free:
                del self._columns[name]
            unneeded.columns += free
            if len(free) == excess:
                break
            unpinned = (name for name in self._sessions if not is_pinned(name))
            if not may_end_sessions or (oldest := next(unpinned, None)) is None:
                break
            self.remove_session(oldest)
            unneeded.sessions.append(oldest)
        return unneeded

    def fit(self, free_bytes: int) -> None:
        """The disk has room for so much beside what is here."""
        columns = len(self._columns) + free_bytes // self._column_bytes
        self._max_columns = min(self._most_columns, max(1, columns))
