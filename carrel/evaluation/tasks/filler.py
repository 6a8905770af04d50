"""The text in which facts are hidden: runs of books, or invented sentences where there are none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from carrel.errors import EvaluationError
from carrel.evaluation.words import ANIMALS, MATERIALS, THINGS, TOWNS

SUFFIXES = (".txt", ".txt.xz")
SENTENCE_END = re.compile(r"(?<=[.!?])[”’\"']?\s+(?=[“‘\"'A-Z])")
BLANKS = re.compile(r"\s+")
# Beyond what is taken: a sentence that is cut at its beginning is left out.
SPARE_CHARS = 2000
VERBS = [
    "reached",
    "left",
    "crossed",
    "praised",
    "painted",
    "remembered",
    "sold",
    "described",
    "carried",
    "forgot",
]


class Filler:
    """Runs of sentences from texts; without texts, of invented ones."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts = [BLANKS.sub(" ", text) for text in texts]

    def sentences(self, num_chars: int, rng: Random) -> list[str]:
        """Sentences from a place that `rng` chooses on; the last is cut so that they have that many characters."""
        seed = rng.random()
        if num_chars <= 0:
            return []
        if not self._texts:
            return list(_taken(_invented(Random(seed)), num_chars))
        text = self._texts[int(seed * len(self._texts))]
        place = int(seed * len(self._texts) % 1 * len(text))
        # the first sentence lacks its beginning; a text that ends goes on with its first sentence
        run = text[place : place + num_chars + SPARE_CHARS]
        while len(run) < num_chars + SPARE_CHARS:
            run += " " + text[: num_chars + SPARE_CHARS - len(run)]
        return list(_taken(iter(SENTENCE_END.split(run)[1:]), num_chars))


def text_files(folder: Path) -> list[Path]:
    """The plain and the packed texts of a folder, sorted. Raises EvaluationError where there are none."""
    found = sorted(path for path in folder.glob("*") if path.name.endswith(SUFFIXES))
    if not found:
        raise EvaluationError(f"no *.txt or *.txt.xz in {folder}: name a folder of plain books")
    return found


def _taken(sentences: Iterator[str], num_chars: int) -> Iterator[str]:
    for sentence in sentences:
        if len(sentence) > num_chars:
            # at a word's end
            if cut := sentence[: num_chars + 1].rpartition(" ")[0]:
                yield cut
            return
        num_chars -= len(sentence) + 1
        yield sentence


def _invented(rng: Random) -> Iterator[str]:
    animals, things = ANIMALS.split(), THINGS.split()
    materials, towns = MATERIALS.split(), TOWNS.split()
    while True:
        yield (
            f"The {rng.choice(animals)} {rng.choice(VERBS)} the {rng.choice(materials)} {rng.choice(things)} "
            f"near {rng.choice(towns)}, and the {rng.choice(animals)} {rng.choice(VERBS)} the {rng.choice(things)}."
        )
