"""One grammar, by llguidance, for the tokens of one model."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carrel.process.request_limits import JSON_WHITE_SPACE
from gpu_worker.grammar.number_bounds import NumberTokens
from gpu_worker.grammar.vocabulary import read_vocabulary
from gpu_worker.records import Grammar, GrammarKind

JSON_OPTIONS = {"whitespace_pattern": JSON_WHITE_SPACE}
# Of memory some 100 MB.
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}

MOST_CHARS = 300
_IN_SCHEMA = re.compile(r"(?s)^.*?failed to compile JSON schema: (.*?)(\n *\d+ \| .*)?$")
# what llguidance says, and what it means
MEANINGS = {
    "NoExtensionBias": "no text is of it; a rule or $ref that leads back to itself needs another way to end, too",
    "Too many items": "its rules come again and again without an end; give each repetition one, and write what "
    "belongs together as one regular expression",
    "too many states": "there are too many ways to read it; repeat less, or fewer different things at once",
    "too many expressions": "it is too large; bound its repetitions by smaller numbers",
}


class GrammarError(ValueError):
    """A grammar that cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """library: the module llguidance. vocabulary: its LLTokenizer. numbers: the tokens there of which numbers are."""

    library: Any
    vocabulary: Any
    numbers: NumberTokens

    @classmethod
    def load(cls, model: Path, eos_token_ids: tuple[int, ...]) -> Compiler:
        """model: a directory or GGUF file. Raises ImportError without the library, and VocabularyError. Other threads
        stop for as long as it takes: a second, where the vocabulary is large."""
        library = importlib.import_module("llguidance")
        vocabulary = read_vocabulary(library, model, eos_token_ids)
        return cls(library, vocabulary, NumberTokens.of(vocabulary))

    def matcher(self, grammar: Grammar) -> Any:
        """An LLMatcher at the beginning of an answer, with the mask of its first token computed. Raises GrammarError.
        Some grammars take for ever, or more stack than there is."""
        limits = self.library.LLParserLimits(**LIMITS)
        matcher = self.library.LLMatcher(self.vocabulary, self._text(grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(reason_of(matcher.get_error()))
        return matcher

    def _text(self, grammar: Grammar) -> str:
        """The grammar as llguidance writes all of them."""
        try:
            match grammar.kind:
                case GrammarKind.JSON_SCHEMA:
                    schema = json.loads(grammar.text)
                    # `true`, which has no options, is what an empty one is
                    schema = {} if schema is True else schema
                    return str(self.library.LLMatcher.grammar_from_json_schema(schema, JSON_OPTIONS))
                case GrammarKind.REGEX:
                    return str(self.library.LLMatcher.grammar_from_regex(grammar.text))
                case GrammarKind.EBNF:
                    return str(self.library.grammar_from("grammar", grammar.text))
        except (ValueError, RecursionError) as error:
            raise GrammarError(reason_of(error)) from error


def reason_of(error: object) -> str:
    """Shorten an error of llguidance to one line without a full stop, of `MOST_CHARS` at most."""
    # of a schema within a grammar the reason alone: its place is in text that the request's author did not write
    text = _IN_SCHEMA.sub(r"\1", str(error))
    meanings = (meaning for words, meaning in MEANINGS.items() if words in text)
    return next(meanings, " ".join(text.removesuffix("<non-verbose/>").split())[:MOST_CHARS])
