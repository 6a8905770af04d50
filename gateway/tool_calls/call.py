"""One call of a tool, read as its JSON comes."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Set

from gateway.json_limits import without_halves
from gateway.tool_calls.checks import FUNCTION_NAME

WHITE_SPACE = " \t\r\n"
OPENING, CLOSING = "{[", "}]"
NAME, ARGUMENTS = "name", frozenset({"arguments", "parameters"})
NOTHING = "{}"


class _Kind(enum.Enum):
    STRING = enum.auto()
    # an object or a list
    NESTED = enum.auto()
    PLAIN = enum.auto()


class CallText:
    """An object in the text of an answer, from its first brace to its end, however malformed it is.

    It is a call if it has a name and arguments, or ends with the name of an offered tool alone. The first name and the
    first arguments count. Each character is looked at once, and brackets of both kinds count alike.
    """

    def __init__(self, offered: Set[str], name: str | None = None) -> None:
        """offered: names of tools. name: what stands before the object, all of which is then the arguments."""
        self.text = ""
        self.name = name
        self.is_over = False
        self._offered = offered
        self._has_name = self._has_arguments = name is not None
        self._depth = 0
        self._is_string = self._is_escaped = self._has_key = False
        # of the object's member that is read: its begin, its key once there is one, and its value's begin
        self._member, self._key, self._value = 1, "", -1
        # of the arguments: where they are if they are an object or a list, or what they are
        self._begin, self._end = (0 if name is not None else -1), -1
        self._arguments: str | None = None
        self._taken = 0

    def push(self, text: str) -> str:
        """Take more. Returns what stands behind the object's end."""
        begin = len(self.text)
        # one reference alone: Python then appends in place
        whole, self.text = self.text, ""
        whole += text
        self.text = whole
        for at in range(begin, len(self.text)):
            self._read(at, self.text[at])
            if self.is_over:
                rest, self.text = self.text[at + 1 :], self.text[: at + 1]
                return rest
        return ""

    @property
    def is_call(self) -> bool:
        """True once it is known to be a call."""
        if self.name is None:
            return False
        has_arguments = self._begin >= 0 or self._arguments is not None
        return has_arguments or (self.is_over and self.name in self._offered)

    def take_arguments(self) -> str:
        """The text of a call's arguments since the last time."""
        if self._begin < 0:
            whole = NOTHING if self._arguments is None else self._arguments
            piece = whole[self._taken :]
        else:
            end = len(self.text) if self._end < 0 else self._end
            piece = self.text[self._begin + self._taken : end]
        self._taken += len(piece)
        return piece

    def _read(self, at: int, character: str) -> None:
        if self._is_string:
            self._read_string(at, character)
        elif character == '"':
            self._begin_value(at)
            self._is_string = True
        elif character in OPENING:
            self._begin_value(at)
            self._depth += 1
        elif character in CLOSING:
            self._depth -= 1
            if self._depth == 1:
                self._end_value(at + 1, _Kind.NESTED)
            elif not self._depth:
                self._end_value(at, _Kind.PLAIN)
                self.is_over = True
        elif self._depth == 1 and character == ",":
            self._end_value(at, _Kind.PLAIN)
            self._member, self._key, self._value, self._has_key = at + 1, "", -1, False
        elif self._depth == 1 and character == ":" and not self._has_key:
            self._key, self._has_key = _string(self.text[self._member : at].strip(WHITE_SPACE)) or "", True
        elif character not in WHITE_SPACE:
            self._begin_value(at)

    def _read_string(self, at: int, character: str) -> None:
        if self._is_escaped or character == "\\":
            self._is_escaped = not self._is_escaped
        elif character == '"':
            self._is_string = False
            self._end_value(at + 1, _Kind.STRING)

    def _begin_value(self, at: int) -> None:
        if self._depth == 1 and self._key and self._value < 0:
            self._value = at
            if self._key in ARGUMENTS and not self._has_arguments and self.text[at] in OPENING:
                self._begin, self._has_arguments = at, True

    def _end_value(self, end: int, kind: _Kind) -> None:
        """kind: the kind of value that ends here."""
        if self._depth > 1 or self._value < 0 or not self._key or _kind(self.text[self._value]) is not kind:
            return
        text = self.text[self._value : end].rstrip(WHITE_SPACE)
        if self._key == NAME and not self._has_name:
            name, self._has_name = _string(text) or "", True
            self.name = name if re.fullmatch(FUNCTION_NAME, name) else None
        elif self._value == self._begin:
            self._end = end
        elif self._key in ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            # JSON within JSON
            inner = _string(text) if kind is _Kind.STRING else text
            self._arguments = text if inner is None else NOTHING if inner in ("", "null") else inner
        # the rest of its member counts for nothing
        self._key = ""


def _kind(first: str) -> _Kind:
    """The kind of a value by its first character."""
    return _Kind.STRING if first == '"' else _Kind.NESTED if first in OPENING else _Kind.PLAIN


def _string(literal: str) -> str | None:
    """The text that a JSON string stands for; None: it is none."""
    try:
        value = json.loads(without_halves(literal.encode()), strict=False)
    except ValueError:
        return None
    return value if type(value) is str else None
