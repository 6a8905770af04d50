"""Text that a model wrote, for the next turn: its answers, and its calls' arguments as the object that templates and
clients take."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from gateway.exchange import Message
from gateway.json_text import read_json

# Anthropic's name for arguments that are not a JSON object
INVALID = "INVALID_JSON"
# so deep they fit into a body beside what is around them
MAX_DEPTH = 100
# no tokenizer should see it
NUL, REPLACED = "\x00", "\ufffd"


def taken_back(message: Message) -> Message:
    """The message; an assistant's with U+FFFD for NUL characters, which a model may write and a client may not."""
    reasoning = message.reasoning or ""
    if message.role != "assistant" or (NUL not in message.content and NUL not in reasoning):
        return message
    content = message.content.replace(NUL, REPLACED)
    return replace(message, content=content, reasoning=reasoning.replace(NUL, REPLACED) or None)


def read_arguments(text: str) -> dict[str, Any]:
    """The object that the text is; of any other text, such as a call that was cut off, an object that holds it.

    Every JSON parser and every tokenizer takes the result: NaN and infinities are null, NUL characters and halves of
    surrogate pairs U+FFFD.
    """
    try:
        found = _plain(read_json(text), MAX_DEPTH)
    except ValueError:
        found = None
    return found if type(found) is dict else {INVALID: text.replace(NUL, REPLACED)}


def _plain(value: Any, depth: int) -> Any:
    """Raises ValueError for a value that is nested deeper than this."""
    if not depth:
        raise ValueError("too deep")
    match value:
        case str():
            return value.replace(NUL, REPLACED)
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {_plain(name, depth): _plain(each, depth - 1) for name, each in value.items()}
        case [*_]:
            return [_plain(each, depth - 1) for each in value]
    return value
