"""JSON of clients and models: how much it may hold, counted before it is decoded, and decoding it."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

from gateway.errors import InvalidRequest, TooLarge

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


# Each is some microseconds until it is a record: a message is one, a part of its content, a call of a tool, ...
MAX_NESTED = 2**14
# names of fields are texts too
MAX_TEXTS = 2**16
# whatever a comma stands between
MAX_VALUES = 2**17
# fields that may hold lists of token ids, which are cheap
ID_FIELDS = ("prompt", "tokens")
# of a token id, its comma included
MAX_ID_BYTES = 11
SPACE = b" \t\r\n"


def check_json(text: bytes, num_token_ids: int = 0) -> int:
    """The number of values, at least; `num_token_ids` of them may be token ids. Raises TooLarge, and InvalidRequest
    for very many long numbers. The counts are exact up to where it stops to be JSON, and what follows is not decoded.
    """
    # what a backslash stands before ends no text
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    check_count(plain.count(b'"') // 2, "texts, names of fields among them", MAX_TEXTS)
    outside = b"".join(plain.split(b'"')[::2])
    check_count(outside.count(b"{") + outside.count(b"["), "objects and lists", MAX_NESTED)
    num_values = outside.count(b",") + 1
    check_count(num_values, "values", MAX_VALUES + num_token_ids)
    # a number of 30 digits is decoded in three times the time of a token id
    num_bytes = len(outside.translate(None, SPACE))
    if num_bytes > MAX_ID_BYTES * (num_values + MAX_VALUES):
        raise InvalidRequest(f"The request has {num_values} values, and not all of {_FIELDS} are token ids.")
    return num_values


def check_others(num_values: int, decoded: Any) -> None:
    """Raises TooLarge where too many of the values are no token ids."""
    if num_values <= MAX_VALUES:
        return
    lists = [decoded.get(name) for name in ID_FIELDS] if isinstance(decoded, dict) else []
    num_others = num_values - sum(map(_num_ids, lists))
    check_count(num_others, f"values beside {_FIELDS}", MAX_VALUES)


def check_count(count: int, what: str, most: int) -> None:
    """Raises TooLarge."""
    if count > most:
        raise TooLarge(
            f"The request has {count} {what}: at most {most} are read. Join messages, or parts of their content, or "
            "send several requests."
        )


_FIELDS = " and ".join(ID_FIELDS)


def _num_ids(prompts: Any) -> int:
    """The number of token ids in one list, or in a list of them."""
    match prompts:
        case [list(), *_]:
            return sum(len(each) for each in prompts if isinstance(each, list))
        case [*_]:
            return len(prompts)
    return 0
