"""A body's JSON, parsed so that others have their turns: of a prompt of a million token ids in one call it would hold
them up for a tenth of a second."""

from __future__ import annotations

import asyncio
import re
import secrets
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from carrel.process.request_limits import MAX_UINT32
from gateway.errors import InvalidRequest
from gateway.heavy_work import CallerWork
from gateway.json_limits import MAX_VALUES, check_count, check_json
from gateway.json_text import without_halves

# a larger body is counted in a thread
LARGE_BYTES = 2**20
# that may be lists of token ids; below so many bytes each is parsed with the rest
FIELDS = ("prompt", "tokens")
LONG_BYTES = 2**12
# of such a list, that are parsed in one turn
PIECE_BYTES = 2**16
IDS = f"token ids: whole numbers from 0 to {MAX_UINT32}"
# all that is in one
NUMBERS = b"0123456789, \t\r\n"


@dataclass(frozen=True, slots=True)
class Place:
    """Of a list in a body, from its first bracket to its last; what field of the body has it."""

    field: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Looked:
    """How many values a body has, and where its long lists are."""

    num_values: int
    places: list[Place]


async def look(raw: bytes, max_token_ids: int, work: CallerWork) -> Looked | None:
    """Count what `parse` would make of a large body, in a thread; None for any other. Raises TooLarge, TooManyRequests
    and Overloaded."""
    if len(raw) <= LARGE_BYTES:
        return None
    return await work.run(len(raw), _look, raw, max_token_ids)


async def parse(raw: bytes, max_token_ids: int, looked: Looked | None) -> Any:
    """As `read_json` has it, with arrays for long lists of token ids. Raises TooLarge, InvalidRequest for a long list
    of anything else where these may be, and ValueError for what is no JSON."""
    looked = looked or _look(raw, max_token_ids)
    # by numbers that a client cannot guess; a text might be the name of a field, where JSON has no list
    lists: dict[int, array[int]] = {}
    rest, at, others = [], 0, []
    for place in looked.places:
        token_ids = await _token_ids(raw[place.begin + 1 : place.end])
        if token_ids is None:
            others.append(place.field)
            continue
        number = 2**128 + secrets.randbits(128)
        lists[number] = token_ids
        rest += [raw[at : place.begin], b" %d " % number]
        at = place.end + 1
    num_others = looked.num_values - sum(map(len, lists.values()))
    if num_others > MAX_VALUES and others:
        raise InvalidRequest(f"{others[0]} is long, and not all of it are {IDS}.", others[0])
    check_count(num_others, f"values beside {' and '.join(FIELDS)}", MAX_VALUES)
    text = b"".join([*rest, raw[at:]])
    try:
        parsed = from_json(text)
    except ValueError:
        parsed = from_json(await asyncio.to_thread(without_halves, text))
    await asyncio.sleep(0)
    if lists:
        parsed |= {name: _put_back(parsed[name], lists) for name in FIELDS if name in parsed}
    return parsed


def _look(raw: bytes, max_token_ids: int) -> Looked:
    """Raises TooLarge."""
    return Looked(check_json(raw, max_token_ids), list(_long_lists(raw)))


def _long_lists(raw: bytes) -> Iterator[Place]:
    """Those without lists in them, in the body's own fields of token ids."""
    # what a backslash stands before ends no text: whatever is in quotes is a whole one
    plain = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    at = depth = 0
    for name in re.finditer(rf'"({"|".join(FIELDS)})"\s*:'.encode(), plain):
        begin, end = name.end(), plain.find(b'"', name.end())
        value = plain[begin : end if end >= 0 else None]
        if len(value) <= LONG_BYTES:
            continue
        depth += _depth(plain[at : name.start()])
        at = begin
        if depth == 1:
            field = name[1].decode()
            yield from (Place(field, at + first, at + last) for first, last in _innermost(value))


def _depth(text: bytes) -> int:
    """How many more brackets it opens than it closes."""
    outside = b"".join(text.split(b'"')[::2])
    return sum(outside.count(each) for each in (b"{", b"[")) - sum(map(outside.count, (b"}", b"]")))


def _innermost(text: bytes) -> Iterator[tuple[int, int]]:
    """Where the brackets of long lists without lists in them are."""
    after, end = 0, text.find(b"]")
    while end >= 0:
        begin = text.rfind(b"[", after, end)
        if begin >= 0 and end - begin > LONG_BYTES:
            yield begin, end
        after, end = end + 1, text.find(b"]", end + 1)


async def _token_ids(text: bytes) -> array[int] | None:
    """None: they are none."""
    token_ids, at = array("I"), 0
    while at <= len(text):
        cut = text.find(b",", at + PIECE_BYTES)
        piece = text[at : cut if cut >= 0 else len(text)]
        try:
            some = [] if piece.translate(None, NUMBERS) else from_json(b"[%b]" % piece)
            token_ids.fromlist(some)
        except (ValueError, OverflowError):
            return None
        if not some:
            return None
        at += len(piece) + 1
        await asyncio.sleep(0)
    return token_ids


def _put_back(parsed: Any, lists: dict[int, array[int]]) -> Any:
    match parsed:
        case int():
            return lists.get(parsed, parsed)
        case [*_]:
            return [_put_back(each, lists) for each in parsed]
    return parsed
