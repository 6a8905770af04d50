"""Sessions: names whose prefix slabs are evicted after those of no session, and pinned ones last of all."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import NotInStore, StoreFull
from kv_store.slabs import Among, SlabAllocator, distinct

MAX_SESSIONS = 4096
MAX_OF_OWNER = 1024
MAX_PINNED_OF_OWNER = 256
# Of the arena, that one owner's pinned sessions may hold.
PINNED_SHARE = 0.25


@dataclass(slots=True)
class Session:
    """The prefix that a name holds. Times are Unix times in seconds.

    slabs: int32 [num_slabs], of all layers, listed under `hashes`; empty where the session is on the disk only."""

    owner: str
    label: str
    hashes: tuple[bytes, ...]
    slabs: npt.NDArray[np.int32]
    created_at: float
    used_at: float
    # 0 where it was never pinned, infinite where it is pinned without an end.
    pinned_until: float = 0.0
    # What of it is on the disk too: the first of `hashes`, or of those before its last turn.
    kept: tuple[bytes, ...] = ()


class SessionDirectory:
    """Holds one reference to each slab of each session until it is held anew, dropped, or the room is needed.

    counts: int32 [num_slabs], how many sessions hold each slab. num_keeping: how many keep each hash on the disk.
    kept_version: it grows with each change of what they keep there.
    """

    def __init__(
        self,
        allocator: SlabAllocator,
        max_sessions: int = MAX_SESSIONS,
        max_of_owner: int = MAX_OF_OWNER,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._allocator = allocator
        self._max_sessions = max_sessions
        self._max_of_owner = max_of_owner
        self._clock = clock
        # the one that was used longest ago first
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._num_of: Counter[str] = Counter()
        self.counts: npt.NDArray[np.int32] = np.zeros(allocator.num_slabs, np.int32)
        self.num_keeping: Counter[bytes] = Counter()
        self.kept_version = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def items(self) -> Iterator[tuple[str, Session]]:
        """All by name, the one that was used longest ago first."""
        return iter(self._sessions.items())

    def of(self, owner: str) -> Iterator[tuple[str, Session]]:
        """Yield an owner's sessions by name, the least recently used first."""
        return ((name, session) for name, session in self._sessions.items() if session.owner == owner)

    def is_pinned(self, session: Session) -> bool:
        return session.pinned_until > self._clock()

    @property
    def num_pinned_slabs(self) -> int:
        """Slabs that pinned sessions hold."""
        return distinct(session.slabs for session in self._sessions.values() if self.is_pinned(session))

    def hold(
        self,
        name: str,
        hashes: tuple[bytes, ...],
        slabs: npt.NDArray[np.int32],
        owner: str = "",
        label: str = "",
    ) -> None:
        """Let the session hold `slabs` (distinct, sealed) instead of what it held before; a pinned one that would pass
        its owner's limit holds that on."""
        now, earlier = self._clock(), self._sessions.get(name)
        session = Session(owner, label, hashes, slabs, now, now)
        if earlier is not None:
            session.created_at, session.pinned_until = earlier.created_at, earlier.pinned_until
            if self.is_pinned(earlier) and self._excess(name, session):
                earlier.used_at = now
                self._sessions.move_to_end(name)
                return
        self._allocator.retain(slabs)
        self.counts[slabs] += 1
        if earlier is not None:
            self.drop(name)
            session.kept = earlier.kept
            self._count_kept(session.kept, 1)
        self._sessions[name] = session
        self._num_of[owner] += 1
        if self._num_of[owner] > self._max_of_owner:
            self.drop(self._oldest([each for each, _ in self.of(owner)]))
        if len(self._sessions) > self._max_sessions:
            self.drop(self._oldest(self._sessions))

    def pin(self, name: str, is_pinned: bool, seconds: float = 0.0) -> None:
        """Evict the session after all that are not pinned, for so long, 0: until it is unpinned; or no longer. Raises
        NotInStore, StoreFull."""
        session = self._get(name)
        if is_pinned and (excess := self._excess(name, session)):
            raise StoreFull(
                f"{excess}; unpin or drop another session, or start the store with a larger --arena-bytes"
            )
        session.pinned_until = (self._clock() + seconds if seconds else math.inf) if is_pinned else 0.0

    def drop(self, name: str) -> Session:
        """Forget a session; what it held is evicted like all else. Raises NotInStore."""
        session = self._get(name)
        del self._sessions[name]
        self._num_of[session.owner] -= 1
        if not self._num_of[session.owner]:
            del self._num_of[session.owner]
        self.counts[session.slabs] -= 1
        self._allocator.release(session.slabs)
        self._count_kept(session.kept, -1)
        return session

    def find(self, name: str) -> Session | None:
        return self._sessions.get(name)

    def restore(self, name: str, session: Session) -> None:
        """One that is on the disk and holds no slabs; the last one restored counts as the last one used."""
        if name not in self._sessions and len(self._sessions) < self._max_sessions:
            self._sessions[name] = session
            self._num_of[session.owner] += 1
            self._count_kept(session.kept, 1)

    def keep(self, name: str, hashes: tuple[bytes, ...]) -> None:
        """Note what a session has on the disk by now: one that holds no slabs has only that, or is forgotten."""
        session = self._sessions[name]
        self._count_kept(session.kept, -1)
        self._count_kept(hashes, 1)
        session.kept = hashes
        if not session.slabs.size:
            session.hashes = hashes
            if not hashes:
                self.drop(name)

    def lose_kept(self, name: bytes) -> None:
        """Note that this is not on the disk any more: sessions keep what precedes it."""
        for session_id, session in tuple(self._sessions.items()):
            if name in session.kept:
                self.keep(session_id, session.kept[: session.kept.index(name)])

    def lose_oldest_kept(self, idle_seconds: float) -> bool:
        """Keep nothing on the disk of the session that was used longest ago, of those that are not pinned and were
        unused for so long. False when there is none."""
        until = self._clock() - idle_seconds
        for name, session in self._sessions.items():
            if session.kept and session.used_at <= until and not self.is_pinned(session):
                self.keep(name, ())
                return True
        return False

    def give_up_oldest(self, among: Among | None = None) -> bool:
        """Let go of the slabs of the session that was used longest ago, of those that are not pinned: it has what is on
        the disk, or is forgotten. False when there is none. among: all slabs of a session that may go may; None: any
        may, and where there is no other a pinned one."""
        holding = [name for name, session in self._sessions.items() if session.slabs.size]
        unpinned = (name for name in holding if not self.is_pinned(self._sessions[name]))
        if among is None:
            name = next(unpinned, next(iter(holding), None))
        else:
            name = next((each for each in unpinned if among(self._sessions[each].slabs).all()), None)
        if name is None:
            return False
        self._cut(name, 0)
        return True

    def give_up(self, hashes: Collection[bytes]) -> None:
        """Let go of the slabs listed under these, and of those behind them, which nobody finds any more."""
        for name, session in tuple(self._sessions.items()):
            lost = (place for place, each in enumerate(session.hashes) if each in hashes)
            if session.slabs.size and (num_left := next(lost, None)) is not None:
                self._cut(name, num_left)

    def _count_kept(self, hashes: tuple[bytes, ...], change: int) -> None:
        for name in hashes:
            self.num_keeping[name] += change
            if not self.num_keeping[name]:
                del self.num_keeping[name]
        self.kept_version += 1

    def _cut(self, name: str, num_left: int) -> None:
        """Keep the slabs under so many first hashes, or only what is on the disk where that is more.

        A session left with neither is forgotten."""
        session = self._sessions[name]
        num_left = 0 if len(session.kept) >= num_left else num_left
        hashes = session.hashes[:num_left] or session.kept
        if not hashes:
            self.drop(name)
            return
        left, given_up = np.split(session.slabs, [num_left * (session.slabs.size // len(session.hashes))])
        self.counts[given_up] -= 1
        self._allocator.release(given_up)
        session.slabs, session.hashes = left, hashes

    def clear(self) -> None:
        for name in tuple(self._sessions):
            self.drop(name)

    def _get(self, name: str) -> Session:
        if (session := self._sessions.get(name)) is None:
            raise NotInStore("there is no such session, or its room was needed")
        return session

    def _oldest(self, names: Collection[str]) -> str:
        unpinned = (name for name in names if not self.is_pinned(self._sessions[name]))
        return next(unpinned, next(iter(names)))

    def _excess(self, name: str, session: Session) -> str:
        """How its owner would pass the limit of pins if this one were pinned with what it holds; empty if not."""
        others = [other for each, other in self.of(session.owner) if each != name and self.is_pinned(other)]
        if len(others) >= MAX_PINNED_OF_OWNER:
            return f"{MAX_PINNED_OF_OWNER} sessions are pinned, the most that one caller may pin"
        share = distinct([session.slabs, *(other.slabs for other in others)]) / self._allocator.num_slabs
        if share > PINNED_SHARE:
            return f"pinned sessions would hold {share:.1%} of the arena, and one caller may pin {PINNED_SHARE:.0%}"
        return ""
