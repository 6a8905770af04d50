"""Answers that are kept so that later requests go on from them: what was said, not what was computed of it."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

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
        """An upper bound of its memory in bytes."""
        num_chars = sum(message.num_chars for message in self.messages)
        num_records = sum(1 + len(message.tool_calls) for message in self.messages)
        return TURN_BYTES + RECORD_BYTES * num_records + CHAR_BYTES * num_chars + len(self.answer)


class _Kept:
    """The turns of one caller, the one that was used longest ago first."""

    def __init__(self) -> None:
        self.num_bytes = 0
        # each with the number of its last use, and how many there are of each session
        self._turns: OrderedDict[str, tuple[int, Turn]] = OrderedDict()
        self._sessions: Counter[str] = Counter()

    @property
    def oldest_use(self) -> int:
        return next(iter(self._turns.values()))[0]

    def add(self, turn: Turn, use: int) -> None:
        self._turns[turn.id] = use, turn
        self._sessions[turn.session_id] += 1
        self.num_bytes += turn.num_bytes

    def get(self, turn_id: str, use: int) -> Turn:
        """Raises UnknownResponse."""
        if turn_id not in self._turns:
            raise UnknownResponse(turn_id)
        _, turn = self._turns[turn_id]
        self._turns[turn_id] = use, turn
        self._turns.move_to_end(turn_id)
        return turn

    def drop(self, turn_id: str | None = None) -> int:
        """Forget one, None: the oldest; how many of its session are left."""
        turn_id = next(iter(self._turns)) if turn_id is None else turn_id
        _, turn = self._turns.pop(turn_id)
        self.num_bytes -= turn.num_bytes
        self._sessions[turn.session_id] -= 1
        if not (left := self._sessions[turn.session_id]):
            del self._sessions[turn.session_id]
        return left


class Turns:
    """In memory, for any thread. A caller finds only its own; the ones that were used longest ago go first, of the
    caller that has too much, or of all."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_caller_bytes: int = MAX_CALLER_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_caller_bytes = max_caller_bytes
        self._callers: dict[bytes, _Kept] = {}
        self._uses = count()
        self._lock = threading.Lock()

    def add(self, caller: bytes, turn: Turn) -> None:
        """Keep it; one that is larger than a caller may have is not kept."""
        with self._lock:
            kept = self._callers.setdefault(caller, _Kept())
            kept.add(turn, next(self._uses))
            while kept.num_bytes > self._max_caller_bytes:
                self._drop(caller)
            while sum(each.num_bytes for each in self._callers.values()) > self._max_bytes:
                self._drop(min(self._callers, key=lambda each: self._callers[each].oldest_use))

    def get(self, caller: bytes, turn_id: str) -> Turn:
        """Raises UnknownResponse."""
        with self._lock:
            return self._of(caller, turn_id).get(turn_id, next(self._uses))

    def messages(self, caller: bytes, turn_id: str) -> tuple[Message, ...]:
        """All that was said up to and with this turn. Raises UnknownResponse where one of them is gone, and TooLarge
        for more messages than a body may have."""
        chain, num_messages = [], 0
        for turn in self._chain(caller, turn_id):
            chain.append(turn)
            num_messages += len(turn.messages)
            check_count(num_messages, "messages behind previous_response_id", MAX_NESTED)
        return tuple(message for turn in reversed(chain) for message in turn.messages)

    def remove(self, caller: bytes, turn_id: str) -> bool:
        """Forget it; whether nothing else of its session is left. Raises UnknownResponse."""
        with self._lock:
            self._of(caller, turn_id).get(turn_id, next(self._uses))
            return not self._drop(caller, turn_id)

    def _chain(self, caller: bytes, turn_id: str | None) -> Iterator[Turn]:
        while turn_id is not None:
            turn = self.get(caller, turn_id)
            yield turn
            turn_id = turn.previous_id

    def _of(self, caller: bytes, turn_id: str) -> _Kept:
        if caller not in self._callers:
            raise UnknownResponse(turn_id)
        return self._callers[caller]

    def _drop(self, caller: bytes, turn_id: str | None = None) -> int:
        left = self._callers[caller].drop(turn_id)
        if not self._callers[caller].num_bytes:
            del self._callers[caller]
        return left
