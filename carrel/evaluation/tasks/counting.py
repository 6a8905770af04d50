"""RULER's word counts: the words that come most often, listed plainly or coded and of fast falling frequency."""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random

from carrel.evaluation.tasks.base import Task, Text
from carrel.evaluation.tasks.filler import Filler
from carrel.evaluation.words import ADJECTIVES, ANIMALS, MATERIALS, THINGS

WORDS = tuple(dict.fromkeys(f"{ADJECTIVES} {ANIMALS} {MATERIALS} {THINGS}".split()))
VOWELS = "aeiou"
CONSONANTS = "bdfgklmnprstvz"
# characters of an entry of a numbered list, and of a coded word
ENTRY_CHARS, CODED_CHARS = 13, 5
# of a common word and of another, in lists from so many characters up
TIMES = ((12_000, 30, 3), (5_000, 6, 1), (0, 3, 1))


@dataclass(frozen=True)
class CommonWords(Task):
    """A numbered list in which `num_common` words come thirty times and every other one three times; in shorter lists
    six times, or three, and once. A short example with its answer goes before."""

    num_common: int = 10

    def write(self, num_chars: int, rng: Random, filler: Filler) -> Text:
        times, other_times = next(found for least, *found in TIMES if num_chars >= least)
        common = rng.sample(WORDS, self.num_common)
        shown = rng.sample([word for word in WORDS if word not in common], self.num_common)
        example = self._listed(0, shown, 2, 1, Random(rng.random()), common)
        text = self._listed(num_chars - len(example), common, times, other_times, Random(rng.random()), shown)
        context = f"{example}\n{self._question()} {', '.join(shown)}.\n\n{text}\n"
        return Text(context, self._question(), tuple(common), f"{times} and {other_times} times")

    def _listed(
        self,
        num_chars: int,
        common: list[str],
        times: int,
        other_times: int,
        rng: Random,
        left_out: list[str],
    ) -> str:
        num_entries = max(2 * len(common) * times, num_chars // ENTRY_CHARS)
        taken = {*common, *left_out}
        num_others = max(1, (num_entries - len(common) * times) // other_times)
        entries = common * times + _others(num_others, taken, rng) * other_times
        rng.shuffle(entries)
        return " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))

    def _question(self) -> str:
        return f"Question: which are the {self.num_common} most common words in the list above? Answer:"


@dataclass(frozen=True)
class FrequentWords(Task):
    """Coded words whose frequencies fall with the square of their rank; the first is dots, the next three are asked
    for."""

    num_asked: int = 3

    def write(self, num_chars: int, rng: Random, filler: Filler) -> Text:
        words = ["...", *("".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(999))]
        asked, order = words[1 : 1 + self.num_asked], Random(rng.random())
        num_words = max(100, num_chars // CODED_CHARS)
        vocabulary = max(len(asked) + 2, min(len(words), num_words // 50))
        weights = [rank**-2.0 for rank in range(1, vocabulary + 1)]
        total = sum(weights)
        coded = [
            word
            for word, weight in zip(words, weights, strict=False)
            for _ in range(max(1, round(num_words * weight / total)))
        ]
        order.shuffle(coded)
        question = (
            f"Question: leaving the dots aside, which are the {self.num_asked} most frequent words of the coded text "
            "above? Answer:"
        )
        return Text(" ".join(coded) + "\n", question, tuple(asked), "zipf")


def _others(num_words: int, taken: set[str], rng: Random) -> list[str]:
    """Draw different words that are not taken, and invent words once the list is used up."""
    known = [word for word in WORDS if word not in taken]
    found = dict.fromkeys(rng.sample(known, min(num_words, len(known))))
    while len(found) < num_words:
        word = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randrange(2, 4)))
        if word not in taken:
            found[word] = None
    return list(found)


COUNTING = {
    "cwe": CommonWords("the ten most common words of a list", 80),
    "fwe": FrequentWords("the three most frequent of coded words", 30),
}
