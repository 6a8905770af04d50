"""Runs of books as token ids, to be forced through decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from carrel.errors import EvaluationError
from carrel.texts import read_text

if TYPE_CHECKING:
    from gateway.tokenizer import Tokenizer

# Characters that are tokenized for a passage, times its tokens: no tokenizer of words has more to a token on average.
CHARS_PER_TOKEN = 6


class Passages:
    """Passage `index` of a length: from the book that is next in turn, at a place that the seed decides."""

    def __init__(self, tokenizer: Tokenizer, files: Sequence[Path], seed: int) -> None:
        """Raises EvaluationError where there is nothing to read."""
        if not files:
            raise EvaluationError("--fidelity needs texts: name a folder with --text-dir or --books")
        self._tokenizer = tokenizer
        self._texts = [read_text(path) for path in files]
        self._seed = seed

    def passage(self, length: int, index: int) -> tuple[int, ...]:
        """`length` token ids, the model's begin token first where it has one. Raises EvaluationError."""
        text, num_chars = self._texts[index % len(self._texts)], CHARS_PER_TOKEN * length
        last = len(text) - num_chars
        place = Random(f"{self._seed}:{length}:{index}").randrange(max(1, last))
        # from a paragraph's beginning on, where there is one
        paragraph = text.find("\n\n", place, place + num_chars // 4)
        place = place if paragraph < 0 else paragraph + 2
        found = self._tokenizer.encode(text[place : place + num_chars], add_special_tokens=True)[:length]
        if len(found) < length:
            raise EvaluationError(f"a text of {len(text)} characters has no passage of {length} tokens")
        return found
