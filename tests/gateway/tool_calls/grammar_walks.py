"""Walks through compiled grammars, token by token, and answers read back."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from gateway.exchange import TextDelta, ToolCallDelta
from gateway.tool_calls import FAMILIES, CallsReader
from gpu_worker.errors import RequestError
from gpu_worker.grammar import Grammars
from gpu_worker.grammar.constraint import GrammarConstraint
from gpu_worker.records import Grammar, GrammarKind

MODEL = Path(__file__).parents[3] / "models" / "carrel-nano"
END, VOCAB_SIZE = 4, 8192
# by default a walk goes anywhere; then it takes what ends texts, lists and objects
LONG, LONGEST = 60, 400


class Walker:
    """Answers of carrel-nano's tokens, held to grammars."""

    def __init__(self) -> None:
        self.grammars = Grammars(str(MODEL), (END,))
        self.tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._closing = {
            token_id
            for token_id in range(VOCAB_SIZE)
            if (text := self.tokenizer.decode([token_id])) and not text.strip('"]}')
        }

    def constraint(self, ebnf: str) -> GrammarConstraint:
        return self.grammars.compile(Grammar(GrammarKind.EBNF, ebnf, "tools")).result()

    def takes(self, ebnf: str, pieces: Iterable[str]) -> bool:
        """Return True if this text, tokenized in pieces, is one of the grammar."""
        constraint = self.constraint(ebnf)
        for piece in pieces:
            for token_id in self.tokenizer.encode(piece, add_special_tokens=False).ids:
                try:
                    constraint.take(token_id)
                except RequestError:
                    return False
        return END in self.allowed(constraint)

    def allowed(self, constraint: GrammarConstraint) -> list[int]:
        """The tokens that may follow, END among them where the answer may end."""
        bits = np.unpackbits(constraint.allowed(VOCAB_SIZE, {END}).view(np.uint8), bitorder="little")
        return [int(each) for each in np.flatnonzero(bits)]

    def walk(self, ebnf: str, source: random.Random) -> str | None:
        """An answer at random, with special tokens by their names; None: it got too long."""
        constraint, tokens = self.constraint(ebnf), list[int]()
        while not constraint.is_complete:
            if len(tokens) > LONGEST:
                return None
            allowed = self.allowed(constraint)
            if END in allowed and (len(tokens) > LONG or source.random() < 0.5):
                break
            allowed = [each for each in allowed if each != END]
            closing = [each for each in allowed if each in self._closing] if len(tokens) > LONG else []
            tokens.append(source.choice(closing or allowed))
            constraint.take(tokens[-1])
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def read(family: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """An answer's text, and its calls' names and arguments."""
    reader = CallsReader(0, FAMILIES[family], True)
    content, calls = "", list[tuple[str, str]]()
    for part in (*reader.push(text), *reader.flush()):
        match part:
            case TextDelta():
                content += part.text
            case ToolCallDelta() if part.name:
                calls.append((part.name, ""))
            case ToolCallDelta():
                calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return content, calls
