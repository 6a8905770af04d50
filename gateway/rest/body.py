"""From bytes on the wire to a checked body."""

from __future__ import annotations

import asyncio
import json
from codecs import BOM_UTF8
from string import ascii_uppercase
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from carrel.process.request_context import rename_request
from gateway.body_limits import BodyLimit, BodyLimits
from gateway.errors import InvalidRequest, SlowBody
from gateway.rest.fields import NOT_DONE
from gateway.rest.parsing import look, parse
from gateway.rest.schemas import AnswerBody, Body

MAX_ERRORS = 10
MANY_ERRORS = 1000
MAX_ERROR_CHARS = 200
# of an error, where pydantic's own words are Python's
JSON_WORDS = {
    "model_type": "Input should be an object",
    "dict_type": "Input should be an object",
    "list_type": "Input should be a valid array",
}
# longer values are not told
MAX_TOLD_CHARS = 40

B = TypeVar("B", bound=Body)
A = TypeVar("A", bound=AnswerBody)

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
    "[key]",
    *ascii_uppercase,
)


async def read_body(request: Request, kind: type[B], limits: BodyLimits) -> B:
    """Read and check a JSON body. Raises TooLarge or WorkerUnavailable before parsing, SlowBody, and InvalidRequest."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # a form could be sent by any web page
        raise InvalidRequest("Send the body as JSON with 'Content-Type: application/json'.")
    encoding = request.headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        raise InvalidRequest(
            f"A body with 'Content-Encoding: {encoding[:MAX_TOLD_CHARS]}' is not unpacked: send it as it is."
        )
    limit = await limits.now()
    async with limits.room.taken(_owner(request), _max_bytes(request, limit)):
        raw = await _read(request, limit, limits.timeout_s)
        caller = request.state.caller
        looked = await look(raw, limit.max_token_ids, limits.work.of(caller))
        async with limits.turns.turn(caller, len(raw)):
            try:
                return kind.model_validate(await parse(raw, limit.max_token_ids, looked))
            except ValidationError as exc:
                raise _invalid(exc) from exc
            except ValueError as exc:
                raise InvalidRequest(f"Invalid JSON: {exc}") from exc
            finally:
                # what becomes of it, and the next body, have turns of their own
                await asyncio.sleep(0)


async def read_asked(request: Request, kind: type[A], limits: BodyLimits) -> A:
    """As `read_body`, what asks for an answer; the answer and what is logged have the request's id of the body, unless
    a header had one."""
    body = await read_body(request, kind, limits)
    state = request.state
    if body.request_id is not None and request.headers.get("x-request-id") != state.request_id:
        state.request_id = body.request_id
        rename_request(body.request_id)
    return body


def _owner(request: Request) -> bytes:
    """The caller, or the client's address where the API is open."""
    caller: bytes = request.state.caller
    return caller or (request.client.host.encode() if request.client else b"")


def _max_bytes(request: Request, limit: BodyLimit) -> int:
    """The length that the request declares; of one in chunks the most that is read. Raises what `excess` is."""
    length = request.headers.get("content-length", "")
    if not length.isascii() or not length.isdigit():
        return limit.max_bytes
    if len(length) > 18 or int(length) > limit.max_bytes:
        raise limit.excess()
    return int(length)


async def _read(request: Request, limit: BodyLimit, timeout_s: float) -> bytes:
    raw = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > limit.max_bytes:
                    raise limit.excess()
    except TimeoutError as exc:
        raise SlowBody(timeout_s) from exc
    # some editors and shells write it first in a file
    return bytes(raw.removeprefix(BOM_UTF8))


def _invalid(exc: ValidationError) -> InvalidRequest:
    """A bounded text: what the client sent could be megabytes, so only short values are told."""
    if (count := exc.error_count()) > MANY_ERRORS:
        # pydantic tells all or none, and to tell them would hold up everybody
        return InvalidRequest(f"{count} fields are not as they must be; most are unknown names in `carrel`.")
    errors = exc.errors(include_url=False, include_context=False)
    lines = list(dict.fromkeys(_line(error) for error in errors))
    more = f"; and {len(lines) - MAX_ERRORS} more" if len(lines) > MAX_ERRORS else ""
    return InvalidRequest("; ".join(lines[:MAX_ERRORS]) + more, _param(errors[0]) or None)


def _line(error: ErrorDetails) -> str:
    param = _param(error)
    text = JSON_WORDS.get(error["type"], error["msg"]).removeprefix("Value error, ")
    match error["type"]:
        case "extra_forbidden":
            text = "there is no such field"
        case kind if kind not in ("missing", NOT_DONE):
            text += _told(error["input"])
    return (f"{param}: {text}" if param else text)[:MAX_ERROR_CHARS]


def _told(value: Any) -> str:
    """What was given, if it is a number, a truth value or a short text."""
    match value:
        case str() if len(value) > MAX_TOLD_CHARS:
            return ""
        case int() if abs(value) > 10**MAX_TOLD_CHARS:
            return ""
        case bool() | int() | float() | str():
            return f", not {json.dumps(value)}"
    return ""


def _param(error: ErrorDetails) -> str:
    places = [str(place) for place in error["loc"]]
    kept = places[:1] + [place for place in places[1:] if not place.startswith(_BRANCHES)]
    return ".".join(kept)[:MAX_ERROR_CHARS]
