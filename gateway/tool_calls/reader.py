"""Calls of tools in an answer's text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gateway.answer_text import num_ambiguous
from gateway.exchange import TextDelta, ToolCallDelta
from gateway.tool_calls.call import CallText
from gateway.tool_calls.families import CallFormat

# Mistral's later models write a call as its name and its arguments
_NAMED = re.compile(r"([A-Za-z0-9_.-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?(?=\{)")
_BEGUN_NAME = re.compile(r"[A-Za-z0-9_.\[\]-]{0,200}")
# Llama's, before calls of tools that it has learnt
_PYTHON_TAG = "<|python_tag|>"

Part = TextDelta | ToolCallDelta


class CallsReader:
    """Tells an answer's text from its calls, as it comes. What begins as a call and is none is text."""

    def __init__(self, index: int, call_format: CallFormat, is_parallel: bool) -> None:
        """index: of the choice. is_parallel: else calls after the first are left out."""
        self._index = index
        self._format = call_format
        self._most = None if is_parallel else 1
        self._held = ""
        self._is_inside = False
        self._has_text = False
        self._call: CallText | None = None
        self._id = ""
        self._told = 0
        self.num_calls = 0

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        while self._held:
            before = self._held, self._is_inside, self._call is None
            if self._call is not None:
                yield from self._read_call(self._call)
            elif self._is_inside:
                yield from self._begin_call()
            else:
                yield from self._read_text()
            if before == (self._held, self._is_inside, self._call is None):
                return

    def flush(self) -> Iterator[Part]:
        """What still waits, once it is known that nothing follows."""
        held, self._held = self._held, ""
        if self._call is not None:
            held = "" if self._call.name is not None else self._format.opener + self._call.text
        elif self._is_inside:
            held = "" if self.num_calls else self._format.opener + held
        if held.strip() if self.num_calls else held:
            yield TextDelta(self._index, held)

    def _read_text(self) -> Iterator[Part]:
        if not self._format.opener:
            yield from self._read_first_brace()
            return
        text, found, rest = self._held.partition(self._format.opener)
        split = len(text) if found else len(text) - num_ambiguous(text, (self._format.opener,))
        # white space around a call is of the call
        text = text[:split].rstrip()
        self._held, self._is_inside = (rest, True) if found else (self._held[len(text) :], False)
        yield from self._tell(text.lstrip() if self.num_calls and not self._has_text else text)

    def _read_first_brace(self) -> Iterator[Part]:
        """An answer that begins with a brace is a call."""
        text = self._held.lstrip()
        if not self._has_text and (not text or _PYTHON_TAG.startswith(text)):
            return
        if not self._has_text and (text := text.removeprefix(_PYTHON_TAG)).startswith("{"):
            self._held, self._is_inside = text, True
            return
        held, self._held = self._held, ""
        yield from self._tell(held)

    def _begin_call(self) -> Iterator[Part]:
        """Between calls."""
        opener = self._format.opener
        if self._format.closer:
            rest = self._held.lstrip()
            if rest.startswith(self._format.closer):
                self._held, self._is_inside = rest.removeprefix(self._format.closer), False
                self._has_text = False
                return
            if self._format.closer.startswith(rest):
                return
            self._held = rest
        else:
            rest = self._held.lstrip(" \n,;]")
            if opener and rest.startswith(opener):
                self._held = rest.removeprefix(opener)
                return
            if opener.startswith(rest) and opener:
                return
            self._held = rest.lstrip(" \n[")
        is_named = self._format.is_special
        if is_named and (found := _NAMED.match(self._held)):
            self._call, self._held = CallText(found[1]), self._held[found.end() :]
        elif self._held.startswith("{"):
            self._call = CallText()
        elif self._held and not (is_named and _BEGUN_NAME.fullmatch(self._held)):
            # no call
            held, self._held, self._is_inside = opener + self._held, "", False
            yield from self._tell(held)

    def _read_call(self, call: CallText) -> Iterator[Part]:
        self._held = call.push(self._held)
        if call.name is not None and self.num_calls != self._most:
            if not self._id:
                self._id, self._told = self._format.new_id(), 0
                yield ToolCallDelta(self._index, self.num_calls, self._id, call.name)
            if piece := call.arguments[self._told :]:
                self._told += len(piece)
                yield ToolCallDelta(self._index, self.num_calls, arguments=piece)
        if call.is_over:
            self._call = None
            if call.name is None:
                yield from self._tell(self._format.opener + call.text)
            elif self._id:
                self.num_calls, self._id = self.num_calls + 1, ""

    def _tell(self, text: str) -> Iterator[Part]:
        if text:
            self._has_text = True
            yield TextDelta(self._index, text)
