"""The calls of workers for sessions: hold, list, pin and drop them, on the disk too."""

from __future__ import annotations

import math

import numpy as np

from kv_store.client.errors import InvalidStoreRequest
from kv_store.client.stats import SessionInfo
from kv_store.disk.tier import DiskTier
from kv_store.sequences import Sequence, check_length
from kv_store.state import StoreState


class SessionCalls:
    """Thread-safe, as `Store`, of which this is part."""

    def __init__(self, state: StoreState, tier: DiskTier | None) -> None:
        self._state = state
        self._tier = tier

    def hold(self, sequence: Sequence, session_id: str, label: str) -> None:
        """Keep what is listed of the sequence under this name; nothing where it has none, or nothing is listed. The
        caller holds the store's lock. Raises InvalidStoreRequest."""
        if not session_id:
            return
        for name, value in (("session_id", session_id), ("session_label", label)):
            check_length(name, value)
        if found := self._state.prefixes.lookup(sequence.prefix_hashes):
            hashes = sequence.prefix_hashes[: len(found)]
            self._state.sessions.hold(session_id, hashes, np.concatenate(found), sequence.owner, label)
            self._save(session_id)

    def list(self, epoch: int, worker_id: str, owner: str) -> tuple[SessionInfo, ...]:
        """An owner's sessions, the one that was used longest ago first."""
        with self._state.entered(epoch, worker_id) as state:
            sessions, tokens_per_slab = state.sessions, state.geometry.tokens_per_slab
            return tuple(
                SessionInfo(
                    session_id=name,
                    label=session.label,
                    num_tokens=len(session.hashes) * tokens_per_slab,
                    num_bytes=len(session.hashes) * state.geometry.layout.num_layers * state.slab_bytes,
                    created_at=session.created_at,
                    used_at=session.used_at,
                    is_pinned=(is_pinned := sessions.is_pinned(session)),
                    pinned_until=session.pinned_until if is_pinned and session.pinned_until < math.inf else 0,
                )
                for name, session in sessions.of(owner)
            )

    def pin(self, epoch: int, worker_id: str, session_id: str, is_pinned: bool, seconds: float = 0.0) -> None:
        """Evict a session after all that are not pinned, for so long, 0: until it is unpinned; or no longer. Raises
        NotInStore, StoreFull, InvalidStoreRequest."""
        if not 0 <= seconds < math.inf:
            raise InvalidStoreRequest(f"seconds is {seconds}, it must be a number from 0 up")
        with self._state.entered(epoch, worker_id) as state:
            state.sessions.pin(session_id, is_pinned, seconds)
            self._save(session_id)

    def drop(self, epoch: int, worker_id: str, session_id: str) -> None:
        """Forget a session. What it held and what follows on that is free at once, but for what another session holds;
        what a sequence uses is free when that ends. Raises NotInStore."""
        with self._state.entered(epoch, worker_id) as state:
            session = state.sessions.drop(session_id)
            dropped = state.prefixes.drop_chain(session.hashes, state.sessions.counts)
            if self._tier is not None:
                self._tier.drop_session(session)
            for sequence in state.sequences:
                if not dropped.isdisjoint(sequence.prefix_hashes):
                    # Its next Seal would list them again.
                    sequence.prefix_hashes = ()

    def _save(self, session_id: str) -> None:
        session = self._state.sessions.find(session_id)
        if self._tier is not None and session is not None:
            self._tier.keep_session(session_id, session)
