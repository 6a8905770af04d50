"""Calls of tools in an answer's text."""

from __future__ import annotations

import enum
import re
from collections.abc import Generator, Iterator, Set

from gateway.answer_text import num_ambiguous
from gateway.exchange import TextDelta, ToolCallDelta
from gateway.tool_calls.call import WHITE_SPACE, CallText
from gateway.tool_calls.families import PYTHON_TAG, CallFormat

# Mistral's later models write a call as its name and its arguments
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{0,64})?(?:\[ARGS\])?(?=\{)")
_BEGUN_NAME = re.compile(r"[A-Za-z0-9_.\[\]-]{0,200}")
# Llama's, before calls of tools that it has learnt

# what models write between calls, a bracket too many included
_BETWEEN = f"{WHITE_SPACE},;}}]"

Part = TextDelta | ToolCallDelta
# whether another step may follow without more text
Step = Generator[Part, None, bool]


class _State(enum.Enum):
    TEXT = enum.auto()
    # behind an opener
    OPENED = enum.auto()
    CALL = enum.auto()
    # behind a call; or before an answer's first brace, where calls have no opener
    BETWEEN = enum.auto()


class CallsReader:
    """Separates an answer's text from its calls, as it comes.

    White space beside a call belongs to the call, and so does what models write between calls. What begins as a call
    and is none is text, as it was written.
    """

    def __init__(
        self, index: int, call_format: CallFormat, is_parallel: bool, offered: Set[str] = frozenset()
    ) -> None:
        """index: of the choice. is_parallel: else calls after the first are left out. offered: names of the tools."""
        self._index = index
        self._format = call_format
        self._most = None if is_parallel else 1
        self._offered = offered
        self._state = _State.TEXT if call_format.opener else _State.BETWEEN
        self._held = ""
        # read already, and text if no call comes of it
        self._lead = ""
        self._call = CallText(offered)
        self._id = ""
        # around the last call: what ends it, what may stand between it and the next, and whether it was named
        self._closer, self._between, self._is_named = "", WHITE_SPACE, False
        self._is_behind_call = False
        self.num_calls = 0

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        while self._held and (yield from self._step()):
            pass

    def flush(self) -> Iterator[Part]:
        """Return the parts that still wait, once it is known that nothing follows."""
        text = self._lead + self._held
        match self._state:
            case _State.CALL:
                text = "" if self._call.is_call else self._lead + self._call.text
            case _State.BETWEEN if self._is_behind_call:
                # "" begins every closer, also one that is empty
                text = "" if self._closer.startswith(self._held) else text
        self._held = self._lead = ""
        yield from self._tell(text)

    def _step(self) -> Step:
        match self._state:
            case _State.TEXT:
                return (yield from self._read_text())
            case _State.OPENED:
                return (yield from self._read_opened())
            case _State.CALL:
                return (yield from self._read_call())
            case _State.BETWEEN:
                return self._read_between()

    def _read_text(self) -> Step:
        opener = self._format.opener
        text, found, rest = self._held.partition(opener) if opener else (self._held, "", "")
        whole = text if found or not opener else text[: len(text) - num_ambiguous(text, (opener,))]
        said = whole.rstrip(WHITE_SPACE) if opener else whole
        if said:
            yield from self._tell(self._lead + said)
            self._lead = ""
        self._lead += whole[len(said) :]
        self._held = text[len(whole) :]
        if found:
            self._state, self._lead, self._held = _State.OPENED, self._lead + opener, rest
        return bool(found)

    def _read_opened(self) -> Step:
        self._skip(WHITE_SPACE)
        rest = self._held
        is_list = bool(self._format.list_begin) and rest.startswith(self._format.list_begin)
        if is_list:
            rest = rest.removeprefix(self._format.list_begin).lstrip(WHITE_SPACE)
        if not rest:
            return False
        if rest.startswith("{"):
            self._begin_call(rest, is_list)
        elif self._format.is_special and (found := _NAMED.match(self._held)):
            self._begin_call(self._held[found.end() :], False, found[1])
        elif self._format.is_special and _BEGUN_NAME.fullmatch(self._held):
            return False
        else:
            yield from self._end_lead(self._lead)
        return True

    def _begin_call(self, rest: str, is_list: bool, name: str | None = None) -> None:
        """rest: from the call's brace on."""
        self._state, self._call, self._id = _State.CALL, CallText(self._offered, name), ""
        self._lead += self._held[: len(self._held) - len(rest)]
        self._held, self._is_named = rest, name is not None
        self._closer = self._format.list_end if is_list else self._format.closer
        self._between = "".join(each for each in _BETWEEN if each != self._closer)

    def _read_call(self) -> Step:
        call = self._call
        self._held = call.push(self._held)
        if call.is_call and self.num_calls != self._most:
            if not self._id:
                self._id = self._format.new_id()
                yield ToolCallDelta(self._index, self.num_calls, self._id, call.name or "")
            if piece := call.take_arguments():
                yield ToolCallDelta(self._index, self.num_calls, arguments=piece)
        if not call.is_over:
            return False
        if call.is_call:
            self._state, self._lead, self._is_behind_call = _State.BETWEEN, "", True
            self.num_calls += bool(self._id)
        else:
            yield from self._end_lead(self._lead + call.text)
        return True

    def _read_between(self) -> bool:
        opener = self._format.opener or PYTHON_TAG
        self._skip(self._between)
        if self._closer and self._held.startswith(self._closer):
            self._state, self._lead, self._held = _State.TEXT, "", self._held.removeprefix(self._closer)
        elif self._held.startswith(opener):
            self._state, self._lead = _State.OPENED, self._lead + opener
            self._held = self._held.removeprefix(opener)
        elif self._held.startswith("{") and not self._is_named:
            self._begin_call(self._held, self._closer == self._format.list_end)
        elif self._closer.startswith(self._held) or opener.startswith(self._held):
            return False
        else:
            self._state, self._lead, self._held = _State.TEXT, "", self._lead + self._held
        return True

    def _skip(self, characters: str) -> None:
        rest = self._held.lstrip(characters)
        self._lead += self._held[: len(self._held) - len(rest)]
        self._held = rest

    def _end_lead(self, text: str) -> Iterator[Part]:
        """Report as text what might have become a call; white space at its end waits for what follows."""
        said = text.rstrip(WHITE_SPACE) if self._format.opener else text
        self._state, self._lead = _State.TEXT, text[len(said) :]
        yield from self._tell(said)

    def _tell(self, text: str) -> Iterator[Part]:
        if text := text.lstrip(WHITE_SPACE) if self._is_behind_call else text:
            self._is_behind_call = False
            yield TextDelta(self._index, text)
