"""carrel-nano's questions: facts of the kinds that it was trained to find, put into held-out books token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from carrel.errors import EvaluationError
from carrel.evaluation import facts
from carrel.evaluation.corpus import Book
from carrel.evaluation.documents import Codec, DocumentError, TokenizedBook, prompt, tokenize_book
from carrel.evaluation.facts import Fact
from carrel.evaluation.questions import Question
from carrel.evaluation.words import Pools, pools
from carrel.texts import read_text

# Room for the answer: a cell's length counts prompt and answer together.
ANSWER_TOKENS = 48
NUM_FACTS = 16

FACT_TASKS: dict[str, Callable[[Random, Pools], list[Fact]]] = {
    "mixed": lambda rng, words: facts.mixed(NUM_FACTS, rng, words),
    "needle": lambda rng, words: facts.draw_set(["number"], rng, words),
}


class FactSuite:
    """Draws question `index` of a task at a length; it depends on nothing but the seed and these three."""

    def __init__(self, codec: Codec, books: Sequence[TokenizedBook], seed: int) -> None:
        self.codec = codec
        self._books = books
        self._seed = seed
        self._words = pools("eval")

    def question(self, task: str, length: int, index: int) -> Question:
        """A prompt that leaves `ANSWER_TOKENS` of `length`. Raises EvaluationError on a length no book can fill."""
        rng = Random(f"{self._seed}:{task}:{length}:{index}")
        drawn = FACT_TASKS[task](rng, self._words)
        book, asked = rng.choice(self._books), rng.randrange(len(drawn))
        try:
            made = prompt(self.codec, book, drawn, asked, length - ANSWER_TOKENS, rng)
        except DocumentError as exc:
            raise EvaluationError(f"no document of {length} tokens: {exc}") from exc
        context_ids, question_ids = tuple(made.context_ids.tolist()), tuple(made.question_ids.tolist())
        return Question(
            index, made.kind, (made.answer,), context_ids, question_ids, ANSWER_TOKENS, is_whole=True
        )


def load_fact_suite(model: Path, books: Sequence[Path], seed: int) -> FactSuite:
    """Reads the tokenizer and the texts. Raises EvaluationError when either cannot be used."""
    if not books:
        raise EvaluationError(
            f"{' and '.join(FACT_TASKS)} need --books DIR, a folder that holds heldout/ with books as *.txt.xz, or "
            "--text-dir"
        )
    path = model / "tokenizer.json"
    if not path.is_file():
        raise EvaluationError(f"no {path}: name the model's directory with --model")
    try:
        codec = Codec(Tokenizer.from_file(str(path)))
    except DocumentError as exc:
        raise EvaluationError(
            f"{' and '.join(FACT_TASKS)} are carrel-nano's: {exc}; give another model --tasks ruler"
        ) from exc
    named = zip(books, map(read_text, books), strict=True)
    # a name has no part in what is asked
    tokenized = [tokenize_book(codec, Book(path.stem, text)) for path, text in named]
    return FactSuite(codec, tokenized, seed)
