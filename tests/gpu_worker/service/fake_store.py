"""The sessions of a store without a store, which may hang."""

from __future__ import annotations

import threading

from carrel.process.histogram import Distribution
from kv_store.client import CallStats, NotInStore, SessionInfo, StoreFull, StoreStats
from kv_store.client.stats import DiskStats, StoreTimes


class FakeStore:
    """`gate` cleared makes every call wait. Holds what `hold` told it, 64 tokens each; one may be pinned."""

    tokens_per_slab = 64

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._held: dict[str, tuple[str, str]] = {}
        self._pinned: dict[str, float] = {}

    def hold(self, session_id: str, label: str, owner: str) -> None:
        self._held[session_id] = (owner, label)

    def list_sessions(self, owner: str) -> tuple[SessionInfo, ...]:
        self.gate.wait()
        return tuple(
            SessionInfo(name, label, 64, 512, 1.5, 2.5, name in self._pinned, self._pinned.get(name, 0.0))
            for name, (of, label) in self._held.items()
            if of == owner
        )

    def stats(self) -> StoreStats:
        self.gate.wait()
        calls = (CallStats("Begin", 0.75, (2, 1), {"OK": 3}),)
        return StoreStats(
            *(1, 4096, 10, 2048, 1024, 0, 2, 0, 1, len(self._held), 0.5, 7, ()),
            evicted_bytes=512,
            call_bounds=(0.5,),
            calls=calls,
            disk=DiskStats(lookup_tokens=20, hit_tokens=11),
            times=StoreTimes(gather=Distribution((0.5,), (1, 2), 3.0)),
            num_pending_trainings=6,
        )

    def pin_session(self, session_id: str, is_pinned: bool, seconds: float) -> None:
        self._find(session_id)
        if not is_pinned:
            self._pinned.pop(session_id, None)
        elif set(self._pinned) - {session_id}:
            raise StoreFull("another is pinned; unpin it")
        else:
            self._pinned[session_id] = seconds

    def drop_session(self, session_id: str) -> None:
        self._find(session_id)
        del self._held[session_id]

    def _find(self, session_id: str) -> None:
        self.gate.wait()
        if session_id not in self._held:
            raise NotInStore("no such session")
