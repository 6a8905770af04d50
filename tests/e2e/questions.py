"""Documents of a wanted length with facts in them, as a user would send them: text and a question."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from carrel.evaluation import documents, facts
from carrel.evaluation.words import pools

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Question:
    """`text` is the whole user message: the document, a blank line, the question."""

    text: str
    answer: str
    num_tokens: int


@cache
def read_book() -> tuple[documents.Codec, documents.TokenizedBook]:
    """Tokenized once: all questions are asked of it."""
    codec = documents.Codec(Tokenizer.from_file(str(ROOT / "models" / "carrel-nano" / "tokenizer.json")))
    source = ROOT / "examples" / "documents" / "voyage-of-the-beagle.txt"
    token_ids = np.array(codec.encode(source.read_text(encoding="utf-8")), dtype=np.uint16)
    return codec, documents.index_book(codec, "beagle", token_ids)


def ask(num_tokens: int, seed: int) -> Question:
    """A chat prompt of about `num_tokens` tokens over the bundled document, with four facts, one of them asked."""
    codec, book = read_book()
    rng = Random(seed)
    drawn = facts.draw_set(["number"] * 4, rng, pools("eval"), near_miss=0.0)
    prompt = documents.prompt(codec, book, drawn, 1, num_tokens, rng)
    text = codec.decode(prompt.document.token_ids)
    return Question(f"{text}\n\n{prompt.question}", prompt.answer, len(prompt.token_ids))
