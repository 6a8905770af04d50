"""Why a grammar cannot be used, for who wrote it: where llguidance speaks of its own parts, in our words."""

from __future__ import annotations

import re

MOST_CHARS = 300
_IN_SCHEMA = re.compile(r"(?s)^.*?failed to compile JSON schema: (.*?)(\n *\d+ \| .*)?$")
# what llguidance says, and what it means
MEANINGS = {
    "NoExtensionBias": "no text is of it; a rule or $ref that leads back to itself needs another way to end, too",
    "Too many items": "its rules come again and again without an end; give each repetition one, and write what "
    "belongs together as one regular expression",
    "too many states": "there are too many ways to read it; repeat less, or fewer different things at once",
    "too many expressions": "it is too large; bound its repetitions by smaller numbers",
}


def reason_of(error: object) -> str:
    """Shorten an error of llguidance to one line without a full stop, of `MOST_CHARS` at most."""
    # of a schema within a grammar the reason alone: its place is in text that the request's author did not write
    text = _IN_SCHEMA.sub(r"\1", str(error))
    meanings = (meaning for words, meaning in MEANINGS.items() if words in text)
    return next(meanings, " ".join(text.removesuffix("<non-verbose/>").split())[:MOST_CHARS])
