"""Where a number of JSON goes on without an end, as its grammar lets it, one is put."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

# In a row. 64 bits have no more, and a double fewer.
MOST_DIGITS = 20
_DIGITS = b"0123456789"
# What may follow a digit of a number, and not of a text: there a quote may, or a letter.
_OF_NUMBERS = _DIGITS + b".eE,]} \t\n\r"

# At the end of an answer: behind a digit that counts, so few that a double still tells the next one.
_AT_NOUGHTS = re.compile(rb"(0{20}|[1-9]\d*\.\d*0{9}|\.\d*[1-9]\d*0{9})$")

_Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class NumberTokens:
    """The tokens of a vocabulary that begin with a digit, with 0, and with what may come in a number or behind it:
    masks [ceil(num_tokens / 32)], token t is bit t % 32 of word t // 32."""

    digits: _Words
    zeros: _Words
    of_numbers: _Words

    @classmethod
    def of(cls, vocabulary: Any) -> Self:
        """vocabulary: an LLTokenizer. Takes some 60 ms for 128k tokens."""
        firsts = [vocabulary.decode_bytes([token_id])[:1] for token_id in range(vocabulary.vocab_size)]
        return cls(*(_mask(firsts, characters) for characters in (_DIGITS, b"0", _OF_NUMBERS)))


class NumberBound:
    """The bound on the numbers of one answer that a JSON grammar constrains."""

    def __init__(self, tokens: NumberTokens) -> None:
        self._tokens = tokens
        self._newest = b""

    def take(self, text: bytes) -> None:
        """The answer goes on with this token."""
        self._newest = (self._newest + text)[-MOST_DIGITS:]

    def narrow(self, mask: _Words, may_end: bool) -> _Words:
        """mask: of the tokens that the grammar allows next, end tokens left out; may_end: one of those may come, too.
        After `MOST_DIGITS` digits of a number no further one may, if anything else may. A number that must be above 7
        is none yet as 7.000..., however long: where it stands at noughts another digit comes, if one may."""
        is_long = len(self._newest) == MOST_DIGITS and not self._newest.strip(_DIGITS)
        stands = _AT_NOUGHTS.search(self._newest) is not None
        num = len(mask)
        if not (is_long or stands) or (mask & ~self._tokens.of_numbers[:num]).any():
            return mask
        rest = mask & ~self._tokens.digits[:num]
        if rest.any() or may_end:
            return rest if is_long else mask
        rest = mask & ~self._tokens.zeros[:num]
        return rest if stands and rest.any() else mask


def _mask(firsts: Sequence[bytes], characters: bytes) -> _Words:
    bits = np.zeros(-(-len(firsts) // 32) * 32, np.uint8)
    bits[: len(firsts)] = [bool(first) and first in characters for first in firsts]
    return np.packbits(bits, bitorder="little").view(np.int32)
