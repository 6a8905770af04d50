"""One call of a tool, read as its JSON comes."""

from __future__ import annotations

import json

OPENING, CLOSING = "{[", "}]"
ARGUMENTS = frozenset({"arguments", "parameters"})


class CallText:
    """A JSON object with a name and arguments, or, given the name, its arguments alone. `is_over`: it is closed;
    `name`: None until it is known.

    Each character is looked at once. What is no JSON is read all the same, as far as its brackets go.
    """

    def __init__(self, name: str | None = None) -> None:
        self.text = ""
        self.name = name
        self._has_name = name is not None
        self.is_over = False
        self._depth = 0
        self._key: str | None = None
        self._string_begin = -1
        self._is_escaped = False
        self._value_begin = -1
        # of its arguments: where they are, if they are an object, or what they are once they are there
        self._begin = self._end = -1
        self._arguments = ""

    def push(self, text: str) -> str:
        """Take more. Returns what stands behind the call's end."""
        begin = len(self.text)
        self.text += text
        for at in range(begin, len(self.text)):
            self._read(at, self.text[at])
            if self.is_over:
                rest, self.text = self.text[at + 1 :], self.text[: at + 1]
                return rest
        return ""

    @property
    def arguments(self) -> str:
        """As far as they came."""
        if self._has_name:
            return self.text
        if self._begin < 0:
            return self._arguments or ("{}" if self.is_over else "")
        return self.text[self._begin : self._end if self._end >= 0 else len(self.text)]

    def _read(self, at: int, character: str) -> None:
        if self._string_begin >= 0:
            self._read_string(at, character)
        elif character == '"':
            self._begin_value(at)
            self._string_begin = at
        elif character in OPENING:
            self._begin_value(at)
            self._depth += 1
            if self._depth == 2 and self._key in ARGUMENTS and self._value_begin == at:
                self._begin = at
        elif character in CLOSING:
            self._depth -= 1
            if self._depth == 1 and self._begin == self._value_begin >= 0:
                self._end = at + 1
            self.is_over = self._depth <= 0
        elif self._depth == 1:
            if character == ",":
                self._key, self._value_begin = None, -1
            elif character != ":" and not character.isspace():
                self._begin_value(at)

    def _begin_value(self, at: int) -> None:
        if self._depth == 1 and self._key is not None and self._value_begin < 0:
            self._value_begin = at

    def _read_string(self, at: int, character: str) -> None:
        if self._is_escaped or character == "\\":
            self._is_escaped = not self._is_escaped
        elif character == '"':
            begin, self._string_begin = self._string_begin, -1
            if self._depth == 1 and not self._has_name:
                self._end_string(_text(self.text[begin : at + 1]))

    def _end_string(self, text: str) -> None:
        """Of a key, or of a value, of the call itself."""
        if self._key is None:
            self._key = text
        elif self._key == "name":
            self.name = text
        elif self._key in ARGUMENTS:
            # JSON within JSON
            self._arguments = text


def _text(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        return literal[1:-1]
