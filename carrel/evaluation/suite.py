"""The questions of an evaluation run, the same for every policy, budget and protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from carrel.errors import EvaluationError
from carrel.evaluation.corpus import CorpusError, book_paths
from carrel.evaluation.fact_suite import ANSWER_TOKENS, FACT_TASKS, FactSuite, load_fact_suite
from carrel.evaluation.questions import Question
from carrel.evaluation.tasks import Filler, text_files
from carrel.evaluation.text_suite import TextSuite
from carrel.texts import read_text
from gateway.errors import ConfigError

if TYPE_CHECKING:
    from gateway.tokenizer import Tokenizer

__all__ = ["ANSWER_TOKENS", "Library", "Question", "Suite"]


@dataclass(frozen=True)
class Library:
    """Where texts come from. books: a folder that holds heldout/ with *.txt.xz. texts: a folder of *.txt or *.txt.xz,
    before those. Without either, sentences are invented."""

    books: Path | None = None
    texts: Path | None = None

    def files(self) -> list[Path]:
        """Return the text files that haystacks are made of. Raises EvaluationError."""
        if self.texts is not None:
            return text_files(self.texts)
        try:
            return [] if self.books is None else book_paths(self.books, "eval")
        except CorpusError as exc:
            raise EvaluationError(str(exc)) from exc


class Suite:
    """Draws question `index` of a task at a length; reads what its tasks need when the first one is asked for."""

    def __init__(self, model: Path, library: Library, seed: int, is_chat: bool = False) -> None:
        self._model = model
        self._library = library
        self._seed = seed
        self._is_chat = is_chat

    def question(self, task: str, length: int, index: int) -> Question:
        """Make a question of at most `length` tokens, its answer included.

        Raises EvaluationError where none can be made.
        """
        source = self.facts if task in FACT_TASKS else self._texts
        return source.question(task, length, index)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        return self.tokenizer.decode(token_ids)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        # here, as it takes seconds: help needs none
        from gateway.tokenizer import load_tokenizer

        try:
            return load_tokenizer(self._model, None)
        except ConfigError as exc:
            raise EvaluationError(str(exc)) from exc

    @cached_property
    def facts(self) -> FactSuite:
        """carrel-nano's own tasks. Raises EvaluationError for another model, or without books."""
        return load_fact_suite(self._model, self._library.files(), self._seed)

    @cached_property
    def _texts(self) -> TextSuite:
        return TextSuite(
            self.tokenizer, Filler(map(read_text, self._library.files())), self._seed, self._is_chat
        )
