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


class Kept(NamedTuple):
    """Parts of a prompt that the store keeps, as the last arguments of the client's `seal` and `end`.

    hashes: names of its slabs, by which others find them. session, label: its session's name, which is a hash, and the
    caller's own id for it.
    """

    hashes: tuple[bytes, ...] = ()
    session: str = ""
    label: str = ""


KEPT_NOTHING = Kept()


class Sessions:
    """The callers' sessions: each request names its own, and each caller sees its own.

    The store knows a session and a caller as hashes of the model, the caller's salt and the session's id; it keeps the
    id itself too, for lists. Any thread may call the methods that ask the store. They wait as long as two calls may
    take, attach to no other store, and raise StoreUnavailable.

    slab_tokens: tokens of a slab; shorter prompts are not held.
    """

    def __init__(self, client: StoreClient, model: bytes = b"") -> None:
        """model: tells models apart that may share a store."""
        self._client = client
        self._model = model
        self.slab_tokens = client.tokens_per_slab
        # Times of dropping by name; the last one at the end.
        self._dropped: OrderedDict[str, float] = OrderedDict()
        # Held during a call that has the store keep a prompt: a session is dropped before it, or after it.
        self._keeping = threading.Lock()

    def owner_of(self, request: GenerationRequest) -> str:
        """Return the owner that the store counts the request's rows for: the caller, whatever salts it gives."""
        return self._owner(request.prefix_salt)

    def name_of(self, request: GenerationRequest) -> tuple[str, str]:
        """Return the name of the request's session and its label; both are empty without one."""
        salt, session_id = request.prefix_salt, request.session_id
        return (self._name(salt, session_id), session_id) if session_id else ("", "")

    @contextmanager
    def keeping(self, request: GenerationRequest, hashes: tuple[bytes, ...]) -> Iterator[Kept]:
        """Yield the parts of a prompt that the store is to keep, by these hashes; call the store within the block.
        Nothing is kept if the session was dropped after the request came."""
        session, label = self.name_of(request)
        with self._keeping:
            is_dropped = request.asked_at <= self._dropped.get(session, float("-inf"))
            yield KEPT_NOTHING if is_dropped else Kept(hashes, session, label)

    def list(self, salt: bytes, session_id: str = "") -> tuple[SessionCard, ...]:
        """Return a caller's sessions, or the one of this id; the least recently used one is first."""
        infos = self._ask(lambda: self._client.list_sessions(self._owner(salt)))
        cards = tuple(self._card(info) for info in infos)
        return tuple(card for card in cards if card.session_id == session_id) if session_id else cards

    def pin(self, salt: bytes, session_id: str, pinned: bool, seconds: float = 0.0) -> bool:
        """Pin a session, which is then evicted after all that are not, or unpin it; False for an unknown one.

        seconds: how long it stays pinned; 0: until it is unpinned. Raises RequestError beyond the caller's limit.
        """
        name = self._name(salt, session_id)
        try:
            return self._finds(lambda: self._client.pin_session(name, pinned, seconds))
        except StoreFull as error:
            raise RequestError(f"The session is not pinned: {error.text}.", "pinned", "pin_limit") from error

    def drop(self, salt: bytes, session_id: str) -> bool:
        """Forget a session and free its slabs; False for an unknown one. Requests that use it continue, and keep
        nothing of it; a later request begins it again."""
        name = self._name(salt, session_id)
        with self._keeping:
            self._dropped[name] = time.monotonic()
            self._dropped.move_to_end(name)
            if len(self._dropped) > MAX_DROPPED:
                self._dropped.popitem(last=False)
        return self._finds(lambda: self._client.drop_session(name))

    def store_stats(self) -> StoreStats:
        """Return the whole store's figures."""
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
