"""Grammars of requests: checked, compiled and kept."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from carrel.process.ready_threads import ReadyThreads
from gpu_worker.errors import RequestError
from gpu_worker.grammar.compiling import Compiler
from gpu_worker.grammar.constraint import GrammarConstraint
from gpu_worker.grammar.number_bounds import NumberBound
from gpu_worker.grammar.trial import Trial
from gpu_worker.grammar.vocabulary import VocabularyError
from gpu_worker.records import Grammar, GrammarKind

NO_LIBRARY = (
    "This worker lacks the package llguidance, without which answers cannot be held to a grammar: "
    "pip install llguidance, and restart it."
)
# Compiled ones, and reasons.
MAX_KEPT = 64
# For masks that take long.
NUM_THREADS = 2


class Grammars:
    """Compiles grammars for one model, one at a time. Loads its library and the model's tokens when first needed: a
    worker without them serves all other requests."""

    def __init__(self, model: str, eos_token_ids: tuple[int, ...]) -> None:
        """model: its directory or GGUF file."""
        self._model = Path(model)
        self._eos_token_ids = eos_token_ids
        self._compiler: Compiler | None = None
        self._trial = Trial(self._model, eos_token_ids)
        # an LLMatcher, or why there is none
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()
        self._queue = ReadyThreads(1, "grammars")
        self._masks = ReadyThreads(NUM_THREADS, "masks")

    def prepare(self) -> None:
        """Load what all grammars need, where it is there. To be called before the first request: that stops all threads
        for a second, where the vocabulary is large."""
        try:
            self._queue.submit(self._load, "").result()
        except RequestError:
            # a request with a grammar gets the error
            return

    def compile(self, grammar: Grammar) -> Future[GrammarConstraint]:
        """The constraint of one answer. Fails with RequestError, about the grammar's field: it is wrong, unsupported or
        too large, or there is nothing here to compile it with. Any thread may ask, and need not wait."""
        return self._queue.submit(self._compile, grammar)

    def close(self) -> None:
        """Nothing is compiled from now on. Does not wait."""
        self._trial.close()
        self._queue.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> GrammarConstraint:
        compiler = self._load(grammar.param)
        if grammar not in self._kept:
            self._kept[grammar] = self._trial.reason(grammar) or compiler.matcher(grammar)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        match self._kept[grammar]:
            case str(reason):
                raise RequestError(f"{grammar.param} cannot be used: {reason}.", grammar.param)
            case matcher:
                numbers = NumberBound(compiler.numbers) if _is_json(grammar) else None
                return GrammarConstraint(
                    matcher.deep_copy(), compiler.vocabulary, grammar.param, self._masks, numbers
                )

    def _load(self, param: str) -> Compiler:
        try:
            self._compiler = self._compiler or Compiler.load(self._model, self._eos_token_ids)
        except ImportError as error:
            raise RequestError(NO_LIBRARY, param, "grammar_unavailable") from error
        except VocabularyError as error:
            reason = f"Answers cannot be held to a grammar here: {error}."
            raise RequestError(reason, param, "grammar_unavailable") from error
        return self._compiler


def _is_json(grammar: Grammar) -> bool:
    """Wholly or, as the arguments of a tool are, in part."""
    return grammar.kind is GrammarKind.JSON_SCHEMA or (
        grammar.kind is GrammarKind.EBNF and "%json" in grammar.text
    )
