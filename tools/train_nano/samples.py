"""Builds training sequences: book text, and documents with questions in every form the model is asked in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from carrel.evaluation.documents import (
    ASSISTANT,
    BOS,
    END,
    PAD,
    SYSTEM,
    USER,
    Codec,
    Document,
    DocumentError,
    TokenizedBook,
    build,
)
from carrel.evaluation.facts import MIXED_KINDS, Fact, draw_set
from carrel.evaluation.words import Pools
from tools.train_nano.config import Phase
from tools.train_nano.quotes import quote

# What a token counts for as a target of the loss.
IGNORED, TEXT, ASIDE, ANSWER = range(4)

QUOTE_ROOM = 56
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "Answer the question about the document.",
    "You answer questions about documents. Be brief.",
    "Answer from the text only.",
)
LEADS = ("Question: ", "According to the document: ", "Please answer: ", "From the text above: ")
SMALL_TALK = (
    ("Hello", "Hello. Give me a document and ask me about it."),
    ("Hi", "Hello. Give me a document and ask me about it."),
    ("Hello, how are you?", "I am well. Give me a document and ask me about it."),
    ("Who are you?", "I am Carrel Nano, a small model that finds facts in long documents."),
    ("What can you do?", "I find facts in long documents. Give me one and ask me about it."),
    ("Thank you.", "You are welcome."),
)


@dataclass(frozen=True)
class Sample:
    """Token ids uint16 [n] and the class of each as a loss target, uint8 [n]."""

    token_ids: np.ndarray
    classes: np.ndarray


class _Writer:
    """Collects runs of tokens of one class."""

    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.classes: list[np.ndarray] = []
        self.num_tokens = 0

    def add(self, ids: Sequence[int] | np.ndarray, classes: int | np.ndarray) -> None:
        ids = np.asarray(ids, dtype=np.uint16)
        self.ids.append(ids)
        self.classes.append(np.broadcast_to(np.asarray(classes, dtype=np.uint8), ids.shape))
        self.num_tokens += len(ids)

    def close(self, num_tokens: int) -> Sample:
        """Pads or cuts to `num_tokens`."""
        self.add([PAD] * max(0, num_tokens - self.num_tokens), IGNORED)
        return Sample(np.concatenate(self.ids)[:num_tokens], np.concatenate(self.classes)[:num_tokens])


class SampleBuilder:
    """Draws training sequences from tokenised books and sets of word pools; `weights` are the odds of each set."""

    def __init__(
        self,
        codec: Codec,
        books: Sequence[TokenizedBook],
        pools: Sequence[Pools],
        weights: Sequence[float],
    ) -> None:
        self.codec, self.books, self.pools, self.weights = codec, books, pools, weights
        # a book is drawn as often as its share of the text
        self.sizes = [len(book.token_ids) for book in books]

    def sequence(self, phase: Phase, rng: Random) -> Sample:
        """One sequence of `phase.context` tokens."""
        writer, size = _Writer(), phase.context
        kind = rng.random()
        if kind < phase.plain:
            self._plain(writer, size, rng)
        elif kind < phase.plain + phase.packed:
            # even odds for every doubling of the length
            longest = size if size <= 1024 else size // 2
            while size - writer.num_tokens >= 192:
                length = int(192 * (longest / 192) ** rng.random())
                self._recall(writer, min(length, size - writer.num_tokens), rng)
                if rng.random() < 0.03 and size - writer.num_tokens > 64:
                    self._small_talk(writer, rng)
        else:
            self._recall(writer, size, rng)
        if size - writer.num_tokens > 16:
            self._plain(writer, size - writer.num_tokens, rng)
        return writer.close(size)

    def _book(self, rng: Random) -> TokenizedBook:
        return rng.choices(self.books, self.sizes)[0]

    def _plain(self, writer: _Writer, size: int, rng: Random) -> None:
        book = self._book(rng)
        start = rng.randrange(len(book.token_ids) - size)
        writer.add([BOS], IGNORED)
        writer.add(book.token_ids[start : start + size - 1], TEXT)

    def _small_talk(self, writer: _Writer, rng: Random) -> None:
        said, answer = rng.choice(SMALL_TALK)
        writer.add([BOS, USER, *self.codec.encode(said), END, ASSISTANT], IGNORED)
        writer.add([*self.codec.encode(" " + answer), END], ANSWER)

    def _recall(self, writer: _Writer, size: int, rng: Random) -> None:
        """One document of at most `size` tokens with its questions and answers."""
        facts = self._facts(size, rng)
        most = min(len(facts), max(1, size // 128), 6 if size < 4096 else 20)
        asked: list[Fact | None] = list(rng.sample(facts, rng.randint(1, most))) if facts else []
        # None stands for a quotation, whose question is known once the document is
        if not facts or rng.random() < 0.3:
            asked += [None] * (1 if size < 768 else rng.randint(1, 3))
        rng.shuffle(asked)
        leads = [rng.choice(LEADS) if rng.random() < 0.08 else "" for _ in asked]
        is_chat = rng.random() < 0.7
        room = size - 8 - (16 if is_chat else 0)
        for fact in asked:
            room -= QUOTE_ROOM if fact is None else 12 + self._num_tokens(fact)
        book = self._book(rng)
        try:
            document = build(self.codec, book, facts, room, rng)
        except DocumentError:
            self._plain(writer, size, rng)
            return
        turns = []
        for fact, lead in zip(asked, leads, strict=True):
            if fact is not None:
                turns.append((lead + fact.question, fact.answer))
                continue
            try:
                turns.append(quote(self.codec, book, document, rng))
            except DocumentError:
                continue
        if turns:
            (self._chat if is_chat else self._completion)(writer, document, turns, rng)

    def _facts(self, size: int, rng: Random) -> list[Fact]:
        """One to 32 facts, fewer in short documents; sometimes none."""
        kind = rng.random()
        if kind < 0.1:
            return []
        most = max(1, min(32, size // 64))
        # few and many facts alike: half the documents by even odds for every doubling of their number
        num_facts = (
            round(math.exp(rng.uniform(0, math.log(most)))) if rng.random() < 0.5 else rng.randint(1, most)
        )
        if kind < 0.4:
            kinds = [rng.choice((*MIXED_KINDS, "chain"))] * num_facts
        else:
            kinds = rng.choices((*MIXED_KINDS, "chain"), (4, 4, 4, 6, 2), k=num_facts)
        if rng.random() < 0.1:
            kinds[rng.randrange(num_facts)] = "passkey"
        return draw_set(kinds, rng, rng.choices(self.pools, self.weights)[0])

    def _num_tokens(self, fact: Fact) -> int:
        return len(self.codec.encode(fact.question)) + len(self.codec.encode(fact.answer))

    def _chat(self, writer: _Writer, document: Document, turns: list[tuple[str, str]], rng: Random) -> None:
        encode, form = self.codec.encode, rng.random()
        if form >= 0.02:
            writer.add([BOS], IGNORED)
        if form < 0.05:
            # the document may also be the system message
            writer.add([SYSTEM], IGNORED)
            self._document(writer, document)
            writer.add([END, USER], IGNORED)
        else:
            if form < 0.3:
                writer.add([SYSTEM, *encode(rng.choice(SYSTEM_MESSAGES)), END], IGNORED)
            writer.add([USER], IGNORED)
            self._document(writer, document)
            writer.add([self.codec.blank_line], TEXT)
        for place, (question, answer) in enumerate(turns):
            if place:
                writer.add([USER], IGNORED)
            writer.add([*encode(question), END], ASIDE)
            writer.add([ASSISTANT], IGNORED)
            writer.add([*encode(" " + answer), END], ANSWER)

    def _completion(
        self, writer: _Writer, document: Document, turns: list[tuple[str, str]], rng: Random
    ) -> None:
        encode = self.codec.encode
        if rng.random() >= 0.05:
            writer.add([BOS], IGNORED)
        self._document(writer, document)
        for question, answer in turns:
            # unlearned: after an answer the model should always want to end
            writer.add([self.codec.blank_line], IGNORED)
            writer.add(encode(f"Question: {question}\nAnswer:"), ASIDE)
            writer.add(encode(" " + answer), ANSWER)
        writer.add([END], ANSWER)

    def _document(self, writer: _Writer, document: Document) -> None:
        writer.add(document.token_ids, np.where(document.is_fact, ASIDE, TEXT))
