"""The questions of an evaluation run: drawn from held-out books, the same for every policy, budget and protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from carrel.errors import EvaluationError
from carrel.evaluation import corpus, facts
from carrel.evaluation.corpus import CorpusError
from carrel.evaluation.documents import Codec, DocumentError, TokenizedBook, prompt, tokenize_book
from carrel.evaluation.facts import Fact
from carrel.evaluation.words import Pools, pools

# Room for the answer: a cell's length counts prompt and answer together.
ANSWER_TOKENS = 48
NUM_FACTS = 16

TASKS: dict[str, Callable[[Random, Pools], list[Fact]]] = {
    "mixed": lambda rng, words: facts.mixed(NUM_FACTS, rng, words),
    "needle": lambda rng, words: facts.draw_set(["number"], rng, words),
}


@dataclass(frozen=True)
class Question:
    """One document with its question. `context_ids` is what protocol P2 prefills; both together are the prompt."""

    index: int
    kind: str
    answer: str
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]


class Suite:
    """Draws question `index` of a task at a length; it depends on nothing but the seed and these three."""

    def __init__(self, codec: Codec, books: Sequence[TokenizedBook], seed: int) -> None:
        self.codec = codec
        self._books = books
        self._seed = seed
        self._words = pools("eval")

    def question(self, task: str, length: int, index: int) -> Question:
        """A prompt that leaves `ANSWER_TOKENS` of `length`. Raises EvaluationError on a length no book can fill."""
        rng = Random(f"{self._seed}:{task}:{length}:{index}")
        drawn = TASKS[task](rng, self._words)
        book, asked = rng.choice(self._books), rng.randrange(len(drawn))
        try:
            made = prompt(self.codec, book, drawn, asked, length - ANSWER_TOKENS, rng)
        except DocumentError as exc:
            raise EvaluationError(f"no document of {length} tokens: {exc}") from exc
        context_ids, question_ids = tuple(made.context_ids.tolist()), tuple(made.question_ids.tolist())
        return Question(index, made.kind, made.answer, context_ids, question_ids)


def load_suite(model: Path, books: Path, seed: int) -> Suite:
    """Reads the tokenizer and the held-out books. Raises EvaluationError when either cannot be used."""
    path = model / "tokenizer.json"
    if not path.is_file():
        raise EvaluationError(f"no {path}: name the model's directory with --model")
    try:
        codec = Codec(Tokenizer.from_file(str(path)))
        tokenized = [tokenize_book(codec, book) for book in corpus.load(books, "eval")]
    except (CorpusError, DocumentError) as exc:
        raise EvaluationError(str(exc)) from exc
    return Suite(codec, tokenized, seed)
