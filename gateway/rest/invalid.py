"""The text of a validation error: bounded, in JSON's words and by the names that the client knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from pydantic import ValidationError

from gateway.errors import InvalidRequest
from gateway.rest.fields import NOT_DONE

MAX_ERRORS = 10
MAX_ERROR_CHARS = 200
# longer values are not shown
MAX_VALUE_CHARS = 40
# instead of pydantic's own words, which are Python's
JSON_WORDS = {
    "model_type": "Input should be an object",
    "dict_type": "Input should be an object",
    "list_type": "Input should be a valid array",
}
# pydantic names the branch of a union in an error's place, a class by its name; a client knows only its own fields
_BRANCHES = (
    "str",
    "int",
    "float",
    "list[",
    "dict[",
    "bool",
    "literal[",
    "constrained-",
    "function-wrap[",
    "function-after[",
    "[key]",
    *ascii_uppercase,
)


def invalid_body(error: ValidationError) -> InvalidRequest:
    """The error of a body. Lists and objects fail at their first wrong entry, so that there are few."""
    return invalid_fields(error.errors(include_url=False, include_context=False))


def invalid_fields(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """The error of these pydantic errors. The client may have sent megabytes, so only short values are shown."""
    lines = list(dict.fromkeys(_line(error) for error in errors))
    more = f"; and {len(lines) - MAX_ERRORS} more" if len(lines) > MAX_ERRORS else ""
    return InvalidRequest("; ".join(lines[:MAX_ERRORS]) + more, _param(errors[0]) or None)


def _line(error: Mapping[str, Any]) -> str:
    param = _param(error)
    text = JSON_WORDS.get(error["type"], error["msg"]).removeprefix("Value error, ")
    match error["type"]:
        case "extra_forbidden":
            text = "there is no such field"
        case kind if kind not in ("missing", NOT_DONE):
            text += _shown(error["input"])
    return (f"{param}: {text}" if param else text)[:MAX_ERROR_CHARS]


def _shown(value: Any) -> str:
    """The value that was given, if it is a number, a truth value or a short text."""
    match value:
        case str() if len(value) > MAX_VALUE_CHARS:
            return ""
        case int() if abs(value) > 10**MAX_VALUE_CHARS:
            return ""
        case bool() | int() | float() | str():
            return f", not {json.dumps(value)}"
    return ""


def _param(error: Mapping[str, Any]) -> str:
    places = [str(place) for place in error["loc"]]
    kept = places[:1] + [place for place in places[1:] if not place.startswith(_BRANCHES)]
    return ".".join(kept)[:MAX_ERROR_CHARS]
