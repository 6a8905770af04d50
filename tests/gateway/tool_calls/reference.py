"""A plain, slow parser of whole answers, which says what the reader of streams must find.

White space is the blank, the tab, the line feed and the carriage return. An *object* begins with `{` and ends with the
bracket that closes it; brackets of both kinds count alike, those in strings do not. Without that bracket the answer's
end cuts it off.

Between its first brace and its end commas part an object's *members*, and the first colon of a member its key, a JSON
string, from its value. A value that begins as a string, an object or a list ends with it; another one ends with its
member. A member without a key or a value counts for nothing. The first `name` counts, if it is a tool's possible name,
and the first of `arguments` and `parameters`. An object is a *call* if it has both, or ends and has the name of an
offered tool alone. Of an object that is cut off a value counts once it has ended, arguments that are an object or a
list from their first character. The call's arguments are their value as it is written; of a string what it says; `{}`
if there are none, or they are `null` or an empty string.

Calls stand in an answer as each family writes them:

- hermes: behind `<tool_call>`. A call ends with `</tool_call>`, or without.
- mistral: behind `[TOOL_CALLS]`, in a list of brackets or without; or as a name, behind which `[CALL_ID]` with an
  id and `[ARGS]` may stand, right before an object, which is then the arguments.
- llama3_json: at the begin of the answer, behind `<|python_tag|>` or not.

More calls may follow, each behind an opener of its own, or behind the one before it alone, unless that has a name
before it. Between them, and before a call's closer or the answer's end, may be white space, commas, semicolons and
closing brackets that are too many; they belong to the call. So does the begin of a closer that the answer's end cuts
off. After a closer the answer is text up to the next opener; of llama3_json all that is not a call is text to the end.

Everything else is text, with an opener behind which there is no object, and with an object that is no call. White space
between text and a call belongs to the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass

WHITE = " \t\r\n"
OPENERS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>"}
CLOSER = "</tool_call>"
NAMED = re.compile(r"[ \t\r\n]*([A-Za-z0-9_.-]{1,64})(\[CALL_ID\][A-Za-z0-9]{0,64})?(\[ARGS\])?(?={)")


@dataclass(frozen=True)
class Piece:
    """A part of an answer as it is written; `call`: the name and arguments of one that is a call."""

    raw: str
    call: tuple[str, str] | None = None


def parts(family: str, answer: str, offered: Set[str]) -> tuple[list[Piece], list[str | tuple[str, str]]]:
    """All that the answer holds, and what is told of it: texts and calls in their order."""
    pieces = list(_merged(_pieces(family, answer, offered)))
    told: list[str | tuple[str, str]] = []
    for at, piece in enumerate(pieces):
        if piece.call is not None:
            told.append(piece.call)
            continue
        text = piece.raw.lstrip(WHITE) if at > 0 else piece.raw
        text = text.rstrip(WHITE) if at < len(pieces) - 1 else text
        told += [text] if text else []
    return pieces, told


def _merged(pieces: Iterator[Piece]) -> Iterator[Piece]:
    text = ""
    for piece in pieces:
        if piece.call is None:
            text += piece.raw
            continue
        if text:
            yield Piece(text)
        text = ""
        yield piece
    if text:
        yield Piece(text)


def _pieces(family: str, answer: str, offered: Set[str]) -> Iterator[Piece]:
    opener, at = OPENERS[family], 0
    while at < len(answer):
        is_once = family == "llama3_json"
        begin = answer.find(opener, at) if not is_once else -1 if at else 0
        yield Piece(answer[at:begin] if begin >= 0 else answer[at:])
        if begin < 0:
            return
        at, begun = begin, _begun(family, answer, begin)
        if begun is None:
            yield Piece(answer[at : at + len(opener)])
            at += len(opener)
        while begun is not None:
            brace, name, is_list = begun
            end, is_cut = _end(answer, brace)
            whole = answer[brace:end]
            call = _call(whole, is_cut, offered) if name is None else (name, whole)
            begun = None
            if call is not None:
                closer = CLOSER if family == "hermes" else "]" if is_list else ""
                after = _skip(answer, end, "".join(each for each in f"{WHITE},;}}]" if each != closer))
                if closer and answer.startswith(closer, after):
                    end = after + len(closer)
                elif after == len(answer) or closer.startswith(answer[after:]):
                    end = len(answer)
                elif answer.startswith(opener, after):
                    begun = _begun(family, answer, after)
                elif answer.startswith("{", after) and name is None:
                    begun = after, None, is_list
            yield Piece(answer[at:end], call)
            at = end


def _begun(family: str, answer: str, at: int) -> tuple[int, str | None, bool] | None:
    """A call's first brace, the name before it, and whether it stands in a list; None: no call begins here."""
    at = _skip(answer, at, WHITE)
    is_opened = answer.startswith(OPENERS[family], at)
    behind = at + len(OPENERS[family]) if is_opened else at
    if family == "mistral" and (named := NAMED.match(answer, behind)):
        return named.end(), named[1], False
    brace = _skip(answer, behind, WHITE)
    is_list = family == "mistral" and answer.startswith("[", brace)
    if is_list:
        brace = _skip(answer, brace + 1, WHITE)
    return (brace, None, is_list) if answer.startswith("{", brace) else None


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _end(text: str, begin: int) -> tuple[int, bool]:
    """Where what begins with a bracket ends, and whether it is cut off there."""
    depth, at = 0, begin
    while at < len(text):
        if text[at] == '"':
            at = _string_end(text, at)
            continue
        depth += (text[at] in "{[") - (text[at] in "}]")
        at += 1
        if not depth:
            return at, False
    return len(text), True


def _string_end(text: str, begin: int) -> int:
    found = re.compile(r'"(\\.|[^"\\])*"', re.S).match(text, begin)
    return found.end() if found else len(text)


def _call(text: str, is_cut: bool, offered: Set[str]) -> tuple[str, str] | None:
    """text: an object."""
    found: dict[str, str] = {}
    members = _members(text[1:] if is_cut else text[1:-1])
    for at, member in enumerate(members):
        key, value = member
        read = _string(key.strip(WHITE))
        if not value.strip(WHITE) or read is None:
            continue
        kind = "arguments" if read in ("arguments", "parameters") else read
        is_last = is_cut and at == len(members) - 1
        value = value.lstrip(WHITE)
        if value[0] == '"':
            end = _string_end(value, 0)
            if is_last and not _is_closed(value[:end]):
                continue
            value = value[:end]
        elif value[0] in "{[":
            end, is_open = _end(value, 0)
            if is_open and kind != "arguments":
                continue
            # white space at the end of what is cut off came, too
            value = value if is_open else value[:end]
        elif is_last:
            continue
        else:
            value = value.rstrip(WHITE)
        found.setdefault(kind, value)
    name = _string(found.get("name", "")) or ""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        return None
    if "arguments" not in found:
        return (name, "{}") if name in offered and not is_cut else None
    value = found["arguments"]
    said = _string(value) if value[0] == '"' else value
    value = value if said is None else said
    return name, "{}" if value in ("", "null") else value


def _is_closed(literal: str) -> bool:
    return re.fullmatch(r'"(\\.|[^"\\])*"', literal, re.S) is not None


def _members(text: str) -> list[tuple[str, str]]:
    """Key and value of each; what has no colon has no value."""
    members, begin, colon, at = list[tuple[str, str]](), 0, -1, 0
    while at <= len(text):
        character = text[at : at + 1]
        if character in ("", ","):
            members.append((text[begin:colon], text[colon + 1 : at]) if colon >= 0 else ("", ""))
            begin, colon = at + 1, -1
        elif character == ":" and colon < 0:
            colon = at
        if character == '"':
            at = _string_end(text, at)
        else:
            at = _end(text, at)[0] if character and character in "{[" else at + 1
    return members


def _string(literal: str) -> str | None:
    """Return the text of a JSON string, with U+FFFD for halves of surrogate pairs."""
    try:
        value = json.loads(literal, strict=False)
    except ValueError:
        return None
    if type(value) is not str:
        return None
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
