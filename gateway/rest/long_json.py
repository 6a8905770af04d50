"""JSON in pieces: to write a million token ids in one call would hold up everybody, in a thread too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from starlette.responses import JSONResponse

# of a long list or object, that are written in one call
NUM_AT_ONCE = 256


class LongJSONResponse(JSONResponse):
    """Of an answer that may be long: then it belongs in a thread; others have Python's lock between two pieces."""

    def render(self, content: Any) -> bytes:
        """What `content` is as JSON."""
        return long_json(content).encode()


def long_json(value: Any) -> str:
    """As compact as `frame` writes it."""
    return "".join(_pieces(value))


def _pieces(value: Any) -> Iterator[str]:
    match value:
        case dict() if len(value) > NUM_AT_ONCE:
            yield "{"
            entries = iter(value.items())
            for at in range(0, len(value), NUM_AT_ONCE):
                yield f"{',' if at else ''}{_json(dict(islice(entries, NUM_AT_ONCE)))[1:-1]}"
            yield "}"
        case dict():
            yield "{"
            for at, (name, each) in enumerate(value.items()):
                yield f"{',' if at else ''}{_json(name)}:"
                yield from _pieces(each)
            yield "}"
        case [dict(), *_] if len(value) <= NUM_AT_ONCE:
            # choices, each of which may be long
            yield "["
            for at, each in enumerate(value):
                yield "," if at else ""
                yield from _pieces(each)
            yield "]"
        case [*_]:
            yield "["
            for begin in range(0, len(value), NUM_AT_ONCE):
                yield f"{',' if begin else ''}{_json(value[begin : begin + NUM_AT_ONCE])[1:-1]}"
            yield "]"
        case _:
            yield _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
