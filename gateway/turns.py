"""Answers that are kept so that later requests go on from them: what was said, not what was computed of it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.errors import UnknownResponse
from gateway.exchange import Message
from gateway.json_limits import MAX_NESTED, check_count

# of all callers, and of one
MAX_BYTES = 256 << 20
MAX_CALLER_BYTES = 64 << 20
# about what a turn takes, and each message and call of it, beside their texts
TURN_BYTES = 2048
RECORD_BYTES = 512
# at most, as Python keeps texts
CHAR_BYTES = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's messages and its answer. previous_id: of the turn before; None for a first one. session_id: of all
    that follow on one first turn, in the KV store. answer: as the client got it, JSON."""

    id: str
    previous_id: str | None
    session_id: str
    messages: tuple[Message, ...]
    answer: bytes

    @property
    def num_bytes(self) -> int:
        """What it takes, or more."""
        num_chars = sum(message.num_chars for message in self.messages)
        num_records = sum(1 + len(message.tool_calls) for message in self.messages)
        return TURN_BYTES + RECORD_BYTES * num_records + CHAR_BYTES * num_chars + len(self.answer)


class Turns:
    """In memory, for any thread. A caller finds only its own; the ones that were used longest ago go first, of the
    caller that has too much, or of all."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_caller_bytes: int = MAX_CALLER_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_caller_bytes = max_caller_bytes
        self._turns: OrderedDict[tuple[bytes, str], Turn] = OrderedDict()
        self._num_bytes: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def add(self, caller: bytes, turn: Turn) -> None:
        """Keep it; one that is larger than a caller may have is not kept."""
        with self._lock:
            self._turns[caller, turn.id] = turn
            self._num_bytes[caller] = self._num_bytes.get(caller, 0) + turn.num_bytes
            while self._num_bytes.get(caller, 0) > self._max_caller_bytes:
                self._drop(next(key for key in self._turns if key[0] == caller))
            while sum(self._num_bytes.values()) > self._max_bytes:
                self._drop(next(iter(self._turns)))

    def get(self, caller: bytes, turn_id: str) -> Turn:
        """Raises UnknownResponse."""
        with self._lock:
            if (turn := self._turns.get((caller, turn_id))) is None:
                raise UnknownResponse(turn_id)
            self._turns.move_to_end((caller, turn_id))
            return turn

    def messages(self, caller: bytes, turn_id: str) -> tuple[Message, ...]:
        """All that was said up to and with this turn. Raises UnknownResponse where one of them is gone, and TooLarge
        for more messages than a body may have."""
        chain, count = [], 0
        for turn in self._chain(caller, turn_id):
            chain.append(turn)
            count += len(turn.messages)
            check_count(count, "messages behind previous_response_id", MAX_NESTED)
        return tuple(message for turn in reversed(chain) for message in turn.messages)

    def remove(self, caller: bytes, turn_id: str) -> bool:
        """Forget it; whether nothing else of its session is left. Raises UnknownResponse."""
        turn = self.get(caller, turn_id)
        with self._lock:
            if (caller, turn_id) in self._turns:
                self._drop((caller, turn_id))
            own = (other for (whose, _), other in self._turns.items() if whose == caller)
            return not any(other.session_id == turn.session_id for other in own)

    def _chain(self, caller: bytes, turn_id: str | None) -> Iterator[Turn]:
        while turn_id is not None:
            turn = self.get(caller, turn_id)
            yield turn
            turn_id = turn.previous_id

    def _drop(self, key: tuple[bytes, str]) -> None:
        turn = self._turns.pop(key)
        self._num_bytes[key[0]] -= turn.num_bytes
        if not self._num_bytes[key[0]]:
            del self._num_bytes[key[0]]
