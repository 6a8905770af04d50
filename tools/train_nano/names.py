"""Invents words that stand in no book: a model that must answer with them has to copy, not to remember."""

from __future__ import annotations

from collections.abc import Container
from random import Random

# fmt: off
ONSETS = (
    "b", "bl", "br", "c", "ch", "cl", "cr", "d", "dr", "f", "fl", "fr", "g", "gl", "gr", "h", "j", "k", "kl", "kn",
    "kr", "l", "m", "n", "p", "ph", "pl", "pr", "qu", "r", "s", "sch", "sh", "sk", "sl", "sm", "sn", "sp", "st", "str",
    "sv", "sw", "t", "th", "tr", "v", "w", "y", "z",
)
VOWELS = (
    "a", "a", "a", "e", "e", "e", "i", "i", "i", "o", "o", "o", "u", "u", "y",
    "ae", "ai", "au", "ea", "ee", "ei", "ia", "ie", "io", "oa", "oe", "oo", "ou", "ue",
)
CODAS = (
    "b", "ck", "d", "dt", "f", "g", "gh", "k", "l", "ld", "ll", "lm", "ls", "lt", "m", "mp", "n", "nd", "ng", "nk",
    "nn", "ns", "nt", "p", "r", "rd", "rg", "rk", "rl", "rm", "rn", "rs", "rt", "s", "sch", "sk", "ss", "st", "t", "th",
    "tt", "tz", "v", "x", "z",
)
# fmt: on
LENGTHS = range(3, 12)


def invent(num_words: int, rng: Random, reserved: Container[str]) -> list[str]:
    """`num_words` different lower-case words of 3 to 11 letters in one to three syllables, none in `reserved`."""
    words: dict[str, None] = {}
    while len(words) < num_words:
        word = "".join(_syllable(rng) for _ in range(rng.choice((1, 2, 2, 2, 3))))
        if len(word) in LENGTHS and word not in reserved:
            words[word] = None
    return list(words)


def _syllable(rng: Random) -> str:
    onset = rng.choice(ONSETS) if rng.random() < 0.85 else ""
    coda = rng.choice(CODAS) if rng.random() < 0.55 else ""
    return onset + rng.choice(VOWELS) + coda
