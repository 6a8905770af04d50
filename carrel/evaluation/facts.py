"""Draws made-up facts with a question and an answer each; no fact can be known from elsewhere than its document."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from carrel.evaluation.words import Pools

# "chain" needs two sentences to be joined and is scored apart; "mixed" draws from the others.
MIXED_KINDS = ("number", "cellar", "hex", "neighbour")
KINDS = (*MIXED_KINDS, "chain", "passkey")

NUMBER_SENTENCES = (
    "The {what} of {name} is {value}.",
    "The {what} of {name} is {value}.",
    "The {what} of {name} is {value}.",
    "Note that the {what} of {name} is {value}.",
    "The {what} for {name} is: {value}.",
    "The {what} belonging to {name} was {value}.",
)
NUMBER_QUESTIONS = (
    "What is the {what} of {name}?",
    "What is the {what} of {name}?",
    "Which {what} does {name} have?",
    "Tell me the {what} of {name}.",
    "What is the {what} for {name} mentioned in the text?",
)
NUMBER_NAMES = ("secret number",) * 5 + (
    "lucky number",
    "access code",
    "special magic number",
    "ticket number",
    "password",
)
CELLAR_SENTENCES = (
    "{name} keeps {value} in the {where}.",
    "{name} keeps {value} in the {where}.",
    "In the {where}, {name} keeps {value}.",
    "Everyone knows that {name} keeps {value} in the {where}.",
)
CELLAR_QUESTIONS = (
    "What does {name} keep in the {where}?",
    "What does {name} keep in the {where}?",
    "What is kept in the {where} of {name}?",
    "Name the thing that {name} keeps in the {where}.",
)
CELLAR_PLACES = ("cellar",) * 5 + ("attic", "kitchen", "garden shed")
HEX_QUESTIONS = (
    'What is the value of the key "{name}"?',
    "What is the value of the key {name}?",
    "Which value belongs to the key {name}?",
    'Look up the key "{name}".',
)
NEIGHBOUR_SENTENCES = (
    "{name} lives next to {value}.",
    "{name} lives next to {value}.",
    "{name} lives next door to {value}.",
    "The house of {name} stands next to the house of {value}.",
)
NEIGHBOUR_QUESTIONS = (
    "Who lives next to {name}?",
    "Who lives next to {name}?",
    "Who is the neighbour of {name}?",
    "Next to whom does {name} live?",
)
CHAIN_QUESTIONS = (
    "In which town does the owner of the {name} live?",
    "Where does the owner of the {name} live?",
    "In which town lives the person who owns the {name}?",
)
PASSKEY_SENTENCES = ("The pass key is {value}.", "The pass key is {value}. Remember it.")
PASSKEY_QUESTIONS = ("What is the pass key?", "Tell me the pass key.")

# Values are split by their checksum, as words are by their place: 1 of 5 for "eval", 1 of 5 for "dev".
VALUE_SPLITS = ("eval", "dev", "train", "train", "train")


@dataclass(frozen=True)
class Fact:
    """One fact: the sentences that state it (apart from each other in a document), a question and its one answer.

    `key` is what the question names; no two facts of one document share it.
    """

    kind: str
    key: str
    sentences: tuple[str, ...]
    question: str
    answer: str


def draw_set(kinds: Sequence[str], rng: Random, words: Pools, near_miss: float = 1 / 3) -> list[Fact]:
    """One fact of each of `kinds`, all keys different.

    With probability `near_miss` a name shares a word (a hex key: its first half) with the last one of its form, so
    that part of a name does not find the answer. Answers share no words, as far as the pools allow.
    Raises ValueError on an unknown kind.
    """
    namer = _Namer(rng, words, near_miss)
    return [_draw(kind, rng, namer) for kind in kinds]


def mixed(num_facts: int, rng: Random, words: Pools) -> list[Fact]:
    """`num_facts` facts, each kind of `MIXED_KINDS` equally often up to one, in random order."""
    kinds = [MIXED_KINDS[place % len(MIXED_KINDS)] for place in range(num_facts)]
    rng.shuffle(kinds)
    return draw_set(kinds, rng, words)


class _Namer:
    """Draws names and values that have not been used in this set of facts."""

    def __init__(self, rng: Random, words: Pools, near_miss: float) -> None:
        self.rng, self.words, self.near_miss = rng, words, near_miss
        self.used: set[str] = set()
        self.used_words: set[str] = set()
        self.last: dict[str, tuple[str, str]] = {}

    def pair(self, form: str, firsts: Sequence[str], seconds: Sequence[str]) -> str:
        """Two words never used together before; often one of them is the last pair's."""
        while True:
            first, second = self.rng.choice(firsts), self.rng.choice(seconds)
            if form in self.last and self.rng.random() < self.near_miss:
                old_first, old_second = self.last[form]
                first, second = (old_first, second) if self.rng.random() < 0.5 else (first, old_second)
            name = f"{first} {second}"
            if name not in self.used and first != second:
                self.used.add(name)
                self.last[form] = (first, second)
                return name

    def animal(self) -> str:
        return self.pair("animal", self.words.adjectives, self.words.animals)

    def person(self) -> str:
        return self.pair("person", self.words.first_names, self.words.surnames)

    def thing(self) -> str:
        return self.pair("thing", self.words.materials, self.words.things)

    def other_person(self) -> str:
        return self.fresh_pair(self.words.first_names, self.words.surnames)

    def other_thing(self) -> str:
        return self.fresh_pair(self.words.materials, self.words.things)

    def fresh_pair(self, firsts: Sequence[str], seconds: Sequence[str]) -> str:
        """Two words for an answer: not near another answer, as long as unused words last."""
        for tries in range(40):
            first, second = self.rng.choice(firsts), self.rng.choice(seconds)
            taken = {first, second} & self.used_words
            if first != second and (not taken or tries > 20) and f"{first} {second}" not in self.used:
                break
        self.used_words |= {first, second}
        self.used.add(f"{first} {second}")
        return f"{first} {second}"

    def hex_key(self) -> str:
        while True:
            key = self.value("0123456789abcdef", self.rng.choice(self.words.hex_digits))
            if "hex" in self.last and self.rng.random() < self.near_miss:
                old = self.last["hex"][0]
                key = old[: len(old) // 2] + key[len(old) // 2 :]
            if key not in self.used and VALUE_SPLITS[zlib.crc32(key.encode()) % 5] == self.words.split:
                self.used.add(key)
                self.last["hex"] = (key, "")
                return key

    def value(self, alphabet: str, num_digits: int) -> str:
        while True:
            value = "".join(self.rng.choices(alphabet, k=num_digits))
            if value[0] == "0" and alphabet == "0123456789":
                continue
            if VALUE_SPLITS[zlib.crc32(value.encode()) % 5] == self.words.split:
                return value

    def number(self) -> str:
        return self.value("0123456789", self.rng.choice(self.words.number_digits))


def _draw(kind: str, rng: Random, namer: _Namer) -> Fact:
    if kind == "number":
        slots = {"what": rng.choice(NUMBER_NAMES), "name": f"the {namer.animal()}", "value": namer.number()}
        return _fact(kind, (rng.choice(NUMBER_SENTENCES),), rng.choice(NUMBER_QUESTIONS), slots)
    if kind == "cellar":
        slots = {
            "name": namer.person(),
            "value": with_article(namer.other_thing()),
            "where": rng.choice(CELLAR_PLACES),
        }
        return _fact(kind, (rng.choice(CELLAR_SENTENCES),), rng.choice(CELLAR_QUESTIONS), slots)
    if kind == "hex":
        value = namer.value("0123456789abcdef", rng.choice(namer.words.hex_digits))
        slots = {"name": namer.hex_key(), "value": value}
        return _fact(kind, ('{{"{name}": "{value}"}}',), rng.choice(HEX_QUESTIONS), slots)
    if kind == "neighbour":
        slots = {"name": namer.person(), "value": namer.other_person()}
        return _fact(kind, (rng.choice(NEIGHBOUR_SENTENCES),), rng.choice(NEIGHBOUR_QUESTIONS), slots)
    if kind == "chain":
        slots = {
            "name": namer.thing(),
            "person": namer.other_person(),
            "value": rng.choice(namer.words.towns),
        }
        sentences = ("The {name} belongs to {person}.", "{person} lives in the town of {value}.")
        return _fact(kind, sentences, rng.choice(CHAIN_QUESTIONS), slots)
    if kind == "passkey":
        slots = {"name": "pass key", "value": namer.number()}
        return _fact(kind, (rng.choice(PASSKEY_SENTENCES),), rng.choice(PASSKEY_QUESTIONS), slots)
    raise ValueError(f"unknown kind of fact {kind!r}: use one of {', '.join(KINDS)}")


def _fact(kind: str, sentences: tuple[str, ...], question: str, slots: dict[str, str]) -> Fact:
    stated = tuple(sentence.format(**slots) for sentence in sentences)
    return Fact(kind, slots["name"], stated, question.format(**slots), slots["value"])


def with_article(noun: str) -> str:
    """The noun after "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
