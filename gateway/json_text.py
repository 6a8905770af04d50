"""JSON to Python's values, as other languages write it: a text may hold half a surrogate pair, which UTF-8 has not."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

HIGH, LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (HIGH, LOW, HIGH.replace(b"{2}", b"[0-9a-fA-F]"), LOW))
REPLACED = b"\\ufffd"


def read_json(text: str | bytes) -> Any:
    """The value. Half a surrogate pair becomes U+FFFD. Raises ValueError for text that is not JSON."""
    try:
        return from_json(text)
    except ValueError:
        return from_json(without_halves(text.encode() if isinstance(text, str) else text))


def without_halves(raw: bytes) -> bytes:
    """The same JSON with U+FFFD for every half of a surrogate pair."""
    # of the same length; what a backslash stands before begins no escape
    plain = raw.replace(b"\\\\", b"__")
    mended = bytearray(raw)
    for half in _HALF.finditer(plain):
        mended[half.start() : half.end()] = REPLACED
    return bytes(mended)
