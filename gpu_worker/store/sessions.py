"""Sessions as the worker names them in the store, and what callers ask of theirs."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from gpu_worker.errors import RequestError, StoreUnavailable
from gpu_worker.records import GenerationRequest, SessionCard
from kv_store.client import NotInStore, SessionInfo, StoreClient, StoreError, StoreFull, StoreStats

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

# Sessions that are remembered as dropped, the last ones: some 200 bytes each.
MAX_DROPPED = 1 << 16


class SessionName(NamedTuple):
    """What a session is to the store: a name, which is a hash, and the caller's own id for it."""

    name: str = ""
    label: str = ""


NO_SESSION = SessionName()


class Kept(NamedTuple):
    """What the store keeps of a prompt: the names of its slabs, by which others find them, and its session."""

    hashes: tuple[bytes, ...] = ()
    session: SessionName = NO_SESSION


class Sessions:
    """The callers' sessions: each request names its own, and each caller sees its own.

    To the store a session and a caller are hashes of the model, the caller's salt and the session's id; the id itself
    lies beside them, to be listed. What asks the store may be called by any thread, waits for it as long as two calls
    may take, leaves its attachment alone, and raises StoreUnavailable.
    """

    def __init__(self, client: StoreClient, model: bytes = b"") -> None:
        """model: what tells models apart that may share a store."""
        self._client = client
        self._model = model
        # When, by the name; the one that was dropped last at the end.
        self._dropped: OrderedDict[str, float] = OrderedDict()
        # Held while the store is told what to keep: a session is dropped before that, or after it.
        self._telling = threading.Lock()

    @property
    def slab_tokens(self) -> int:
        """Of a slab: shorter prompts are not held."""
        return self._client.tokens_per_slab

    def owner_of(self, request: GenerationRequest) -> str:
        """Who the store counts what the request holds for: the caller, whatever salts it gives."""
        return self._owner(request.prefix_salt)

    def name_of(self, request: GenerationRequest) -> SessionName:
        """Of the session that the request names, if any."""
        salt, session_id = request.prefix_salt, request.session_id
        return SessionName(self._name(salt, session_id), session_id) if session_id else NO_SESSION

    @contextmanager
    def keeping(self, request: GenerationRequest, hashes: tuple[bytes, ...]) -> Iterator[Kept]:
        """What the store is to keep of a prompt, by these hashes; it is told within. Nothing, where the session was
        dropped after the request came."""
        session = self.name_of(request)
        with self._telling:
            is_dropped = request.asked_at <= self._dropped.get(session.name, float("-inf"))
            yield Kept() if is_dropped else Kept(hashes, session)

    def list(self, salt: bytes, session_id: str = "") -> tuple[SessionCard, ...]:
        """A caller's sessions, or the one of this id; the one that was used longest ago first."""
        infos = self._ask(lambda: self._client.list_sessions(self._owner(salt)))
        cards = tuple(self._card(info) for info in infos)
        return tuple(card for card in cards if card.session_id == session_id) if session_id else cards

    def pin(self, salt: bytes, session_id: str, pinned: bool, seconds: float = 0.0) -> bool:
        """Evict a session after all that are not pinned, for so long, 0: until it is unpinned; or no longer. False for
        an unknown one. Raises RequestError beyond the caller's limit."""
        name = self._name(salt, session_id)
        try:
            return self._finds(lambda: self._client.pin_session(name, pinned, seconds))
        except StoreFull as error:
            raise RequestError(f"The session is not pinned: {error.text}.", "pinned", "pin_limit") from error

    def drop(self, salt: bytes, session_id: str) -> bool:
        """Forget a session and free what it holds; False for an unknown one. Requests that use it go on, and leave
        nothing of it: only one that comes later makes it anew."""
        name = self._name(salt, session_id)
        with self._telling:
            self._dropped[name] = time.monotonic()
            self._dropped.move_to_end(name)
            if len(self._dropped) > MAX_DROPPED:
                self._dropped.popitem(last=False)
        return self._finds(lambda: self._client.drop_session(name))

    def store_stats(self) -> StoreStats:
        """The whole store's figures."""
        return self._ask(self._client.stats)

    def _owner(self, salt: bytes) -> str:
        return _digest(self._model, salt, b"owner").hex()

    def _name(self, salt: bytes, session_id: str) -> str:
        key = _digest(self._model, salt, b"caller")
        return _digest(key, session_id.encode("utf-8", "surrogateescape"), b"session").hex()

    def _card(self, info: SessionInfo) -> SessionCard:
        return SessionCard(
            session_id=info.label,
            tokens=info.num_tokens,
            bytes=info.num_bytes,
            created_at=info.created_at,
            last_used_at=info.used_at,
            pinned=info.is_pinned,
            expires_at=info.pinned_until,
        )

    def _finds(self, change: Callable[[], None]) -> bool:
        try:
            self._ask(change)
        except NotInStore:
            return False
        return True

    def _ask(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except (NotInStore, StoreFull):
            raise
        except StoreError as error:
            # The engine's thread attaches again.
            logger.warning("a call about sessions failed: %s", error)
            raise StoreUnavailable("the KV store does not answer") from error


def _digest(key: bytes, content: bytes, kind: bytes) -> bytes:
    return hashlib.blake2b(content, key=key[:64], digest_size=32, person=kind).digest()
