"""Builds documents of book text with facts in it, and prompts of an exact length, all at token level.

A prompt is two token runs: the context (everything up to the blank line after the document) and the question. Their
concatenation is what tokenising the whole text gives, so protocol P1 prefills both and P2 the context alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

import numpy as np
from tokenizers import Tokenizer

from carrel.evaluation.corpus import Book
from carrel.evaluation.facts import Fact

SPECIAL_TOKENS = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>")
BOS, SYSTEM, USER, ASSISTANT, END, PAD = range(len(SPECIAL_TOKENS))

STYLES = ("chat", "completion")
ABBREVIATIONS = "Mr Mrs Ms Dr St Messrs Mme Mlle Capt Col Gen Rev Hon Esq Prof No Vol"


class DocumentError(ValueError):
    """A document cannot be built: the book is too short, or the facts leave no room for text."""


class Codec:
    """The tokenizer with what the builder needs to know about its tokens; encodes without special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        blank_line = tokenizer.token_to_id("ĊĊ")
        if blank_line is None or tokenizer.token_to_id(SPECIAL_TOKENS[END]) != END:
            raise DocumentError(
                "not a carrel-nano tokenizer: no blank-line token, or special tokens out of place"
            )
        self.blank_line: int = blank_line

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        # a batch of one: without offsets, which are not needed, it takes half the time
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Text of `token_ids`, special tokens left out."""
        return self.tokenizer.decode(np.asarray(token_ids).tolist())

    @cached_property
    def _strings(self) -> list[str]:
        return [
            self.tokenizer.decode([i], skip_special_tokens=False)
            for i in range(self.tokenizer.get_vocab_size())
        ]

    @cached_property
    def ends_sentence(self) -> np.ndarray:
        """Bool per token id: it closes a sentence."""
        closers = "”’\"')"
        return np.array(
            [s.rstrip(closers).endswith((".", "!", "?")) and s[-1] in closers + ".!?" for s in self._strings]
        )

    @cached_property
    def is_abbreviation(self) -> np.ndarray:
        """Bool per token id: a full stop after it does not close a sentence."""
        abbreviations = frozenset(ABBREVIATIONS.split())
        return np.array([s.strip() in abbreviations or len(s.strip()) == 1 for s in self._strings])

    @cached_property
    def starts_word(self) -> np.ndarray:
        """Bool per token id: it begins with a space, so text may be cut before it."""
        return np.array([s.startswith(" ") and len(s) > 1 for s in self._strings])

    @cached_property
    def is_newline(self) -> np.ndarray:
        """Bool per token id: it is a run of newlines."""
        return np.array([s.strip("\n") == "" and s != "" for s in self._strings])


@dataclass(frozen=True)
class TokenizedBook:
    """A book as token ids: uint16 [n]; sentence and paragraph starts are int32 positions in it, ascending.

    A sentence start is a place inside a paragraph at which " <sentence>" may be inserted.
    """

    name: str
    token_ids: np.ndarray
    sentence_starts: np.ndarray
    paragraph_starts: np.ndarray


@dataclass(frozen=True)
class Document:
    """Book text with facts in it; the text is tokens `start` to `end` of the book."""

    token_ids: np.ndarray  # uint16 [n]
    facts: tuple[Fact, ...]
    is_fact: np.ndarray  # bool [n], true on the tokens of the facts
    start: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """A prompt whose answer is known; `context_ids` + `question_ids` is the whole prompt."""

    document: Document
    question: str
    answer: str
    kind: str
    style: str
    context_ids: np.ndarray  # uint16
    question_ids: np.ndarray  # uint16

    @property
    def token_ids(self) -> np.ndarray:
        """The whole prompt, uint16."""
        return np.concatenate([self.context_ids, self.question_ids])


def tokenize_book(codec: Codec, book: Book, max_chars: int | None = None) -> TokenizedBook:
    """Tokenises the first `max_chars` characters of a book (all of it by default)."""
    return index_book(codec, book.name, np.array(codec.encode(book.text[:max_chars]), dtype=np.uint16))


def index_book(codec: Codec, name: str, token_ids: np.ndarray) -> TokenizedBook:
    """Finds the sentence and paragraph starts of a book given as uint16 token ids."""
    before, after = token_ids[1:-1], token_ids[2:]
    closes = codec.ends_sentence[before] & ~codec.is_abbreviation[token_ids[:-2]]
    sentences = np.flatnonzero(closes & codec.starts_word[after]) + 2
    paragraphs = np.flatnonzero(token_ids[:-1] == codec.blank_line) + 1
    paragraphs = np.concatenate([[0], paragraphs])
    return TokenizedBook(name, token_ids, sentences.astype(np.int32), paragraphs.astype(np.int32))


def build(codec: Codec, book: TokenizedBook, facts: Sequence[Fact], num_tokens: int, rng: Random) -> Document:
    """A document of at most `num_tokens` tokens, a few fewer at most, that starts at a random paragraph of `book`.

    Every sentence of every fact goes to its own uniformly drawn place: as a sentence inside a paragraph or as a
    paragraph of its own (JSON lines always so). Raises DocumentError when the facts or the book do not fit.
    """
    sentences = [(place, text) for place, fact in enumerate(facts) for text in fact.sentences]
    pieces = {key: codec.encode(key[1]) for key in sentences}
    # one blank line or one leading space per inserted sentence
    room = num_tokens - sum(len(ids) + 1 for ids in pieces.values())
    if room < 16:
        raise DocumentError(
            f"{len(facts)} facts leave {room} of {num_tokens} tokens for text: ask for a longer document"
        )
    start, end = _draw_span(codec, book, room, rng)
    cuts = sorted(((_draw_gap(book, start, end, text, rng), rng.random(), text) for _, text in sentences))
    parts: list[np.ndarray] = []
    marks: list[np.ndarray] = []
    at = start
    for (gap, own_paragraph), _, text in cuts:
        _append(parts, marks, book.token_ids[at:gap], False)
        ids = [*codec.encode(text), codec.blank_line] if own_paragraph else codec.encode(" " + text)
        _append(parts, marks, np.array(ids, dtype=np.uint16), True)
        at = gap
    _append(parts, marks, book.token_ids[at:end], False)
    return Document(np.concatenate(parts), tuple(facts), np.concatenate(marks), start, end)


def prompt(
    codec: Codec,
    book: TokenizedBook,
    facts: Sequence[Fact],
    asked: int,
    num_tokens: int,
    rng: Random,
    style: str = "chat",
) -> Prompt:
    """A prompt of `num_tokens` tokens (a few fewer at most), question included, that asks for `facts[asked]`.

    `style` is "chat" (the chat template, one user message) or "completion" (plain text that ends in "Answer:").
    Raises DocumentError as `build` does, and on an unknown style.
    """
    fact = facts[asked]
    opening, question_ids = frame(codec, fact.question, style)
    document = build(codec, book, facts, num_tokens - len(opening) - 1 - len(question_ids), rng)
    return ask(codec, document, fact.question, fact.answer, fact.kind, style)


def ask(codec: Codec, document: Document, question: str, answer: str, kind: str, style: str) -> Prompt:
    """The prompt that asks `question` about `document`. Raises DocumentError on an unknown style."""
    opening, question_ids = frame(codec, question, style)
    context = [np.array(opening, np.uint16), document.token_ids, np.array([codec.blank_line], np.uint16)]
    question_array = np.array(question_ids, np.uint16)
    return Prompt(document, question, answer, kind, style, np.concatenate(context), question_array)


def frame(codec: Codec, question: str, style: str) -> tuple[list[int], list[int]]:
    """The token ids before the document and those after its blank line, up to where the answer starts."""
    if style == "chat":
        return [BOS, USER], [*codec.encode(question), END, ASSISTANT]
    if style == "completion":
        return [BOS], codec.encode(f"Question: {question}\nAnswer:")
    raise DocumentError(f"unknown style {style!r}: use one of {', '.join(STYLES)}")


def _append(parts: list[np.ndarray], marks: list[np.ndarray], ids: np.ndarray, is_fact: bool) -> None:
    parts.append(ids)
    marks.append(np.full(len(ids), is_fact))


def _draw_span(codec: Codec, book: TokenizedBook, room: int, rng: Random) -> tuple[int, int]:
    last = len(book.token_ids) - room - 1
    if last < 0:
        raise DocumentError(
            f"{book.name} has {len(book.token_ids)} tokens, too few for {room}: take a longer book"
        )
    choices = int(np.searchsorted(book.paragraph_starts, last, side="right"))
    start = int(book.paragraph_starts[rng.randrange(choices)])
    end = start + room
    # cut between words, and leave the blank line to the caller
    while end > start + 1 and not codec.starts_word[book.token_ids[end]]:
        end -= 1
    while end > start + 1 and codec.is_newline[book.token_ids[end - 1]]:
        end -= 1
    return start, end


def _draw_gap(book: TokenizedBook, start: int, end: int, text: str, rng: Random) -> tuple[int, bool]:
    """A place in [start, end) and whether the text becomes a paragraph of its own there."""
    target = rng.randrange(start, end)
    own_paragraph = text.startswith("{") or rng.random() < 0.5
    starts = book.paragraph_starts if own_paragraph else book.sentence_starts
    place = np.searchsorted(starts, target, side="right") - 1
    if place >= 0 and starts[place] > start:
        return int(starts[place]), own_paragraph
    # none before the target: the document's own start is a paragraph start
    return start, True
