"""Needles in a haystack, in RULER's eight forms, and asked for in turn on one context."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from carrel.evaluation.tasks.base import Task, Text
from carrel.evaluation.tasks.filler import Filler

CITY_NAMES = """
Lisbon Paris Rome Vienna Prague Berlin Madrid Dublin Oslo Helsinki Athens Cairo Tokyo Seoul Beijing Delhi Mumbai Lagos
Nairobi Lima Bogota Havana Boston Chicago Denver Dallas Houston Seattle Miami Atlanta Toronto Montreal Vancouver
Sydney Melbourne Perth Auckland Jakarta Manila Bangkok Hanoi Singapore Moscow Warsaw Budapest Bucharest Sofia Belgrade
Zagreb Zurich Geneva Milan Naples Venice Florence Turin Barcelona Valencia Seville Porto Bordeaux Lyon Marseille
Brussels Antwerp Amsterdam Rotterdam Hamburg Munich Frankfurt Cologne Stuttgart Dresden Leipzig Copenhagen Stockholm
Edinburgh Glasgow London Manchester Liverpool Bristol Oxford Cambridge Istanbul Ankara Damascus Baghdad Tehran Kabul
Karachi Lahore Kathmandu Calcutta Madras Colombo Rangoon Santiago Quito Caracas Brasilia Montevideo Casablanca Tunis
Algiers Tripoli Khartoum Accra Dakar Kinshasa Luanda Pretoria
"""
CITIES = tuple(CITY_NAMES.split())
NOISE = "The bread is warm. The river is wide. The road is long. We walk on. There and back again."
# characters of a needle beside its neighbours
NEEDLE_CHARS = 62
UUID_NEEDLE_CHARS = 125


@dataclass(frozen=True)
class Needles(Task):
    """`num_keys` cities, each with `num_values` numbers, hidden in `haystack`; `num_asked` of them are asked for.

    In a haystack of needles every line is one. `is_uuid`: uuids in place of the numbers, and of a haystack's cities.
    """

    haystack: Literal["text", "noise", "needles"] = "text"
    num_keys: int = 1
    num_values: int = 1
    num_asked: int = 1
    is_uuid: bool = False

    def write(self, num_chars: int, rng: Random, filler: Filler) -> Text:
        word = "uuid" if self.is_uuid else "number"
        keys = self._draw_keys(rng, num_chars)
        asked = keys[: self.num_asked]
        values = {key: [self._value(rng) for _ in range(self.num_values)] for key in keys}
        needles = [needle(key, value, word) for key in keys for value in values[key]]
        places = [rng.random() for _ in needles]
        around = rng.random()
        context = self._hide(needles, places, num_chars, Random(around), filler)
        names = join_names(asked)
        answers = tuple(value for key in asked for value in values[key])
        depth = f"depth {int(10 * places[0])}"
        return Text(context + "\n", question_of(names, word, len(answers)), answers, depth)

    def _draw_keys(self, rng: Random, num_chars: int) -> list[str]:
        if self.haystack != "needles":
            return rng.sample(CITIES, self.num_keys)
        if self.is_uuid:
            draw: Callable[[], str] = lambda: make_uuid(rng)  # noqa: E731
            size = UUID_NEEDLE_CHARS
        else:
            draw, size = lambda: f"{rng.choice(CITIES)} {rng.randrange(1000, 10000)}", NEEDLE_CHARS
        return [draw() for _ in range(max(self.num_keys, num_chars // size))]

    def _value(self, rng: Random) -> str:
        return make_uuid(rng) if self.is_uuid else str(rng.randrange(1_000_000, 10_000_000))

    def _hide(
        self, needles: Sequence[str], places: Sequence[float], num_chars: int, rng: Random, filler: Filler
    ) -> str:
        if self.haystack == "needles":
            order = sorted(range(len(needles)), key=lambda index: places[index])
            return "\n".join(needles[index] for index in order)
        room = num_chars - sum(len(text) + 1 for text in needles)
        if self.haystack == "noise":
            return "\n".join(insert([NOISE] * max(1, room // (len(NOISE) + 1)), needles, places))
        return " ".join(insert(filler.sentences(room, rng), needles, places))


def needle(key: str, value: str, word: str = "number") -> str:
    return f"One of the special magic {word}s for {key} is: {value}."


def question_of(names: str, word: str, num_answers: int) -> str:
    """Ends where the answer begins."""
    if num_answers == 1:
        subject, verb = f"the special magic {word} for {names} mentioned in the text", "is"
    else:
        subject, verb = f"all the special magic {word}s for {names} mentioned in the text", "are"
    return f"What {verb} {subject}? {subject[0].upper()}{subject[1:]} {verb}"


def insert(lines: Sequence[str], needles: Sequence[str], places: Sequence[float]) -> list[str]:
    """Each needle before the line at its place, a share of the lines; those of one line in their shares' order."""
    found: list[str] = []
    order = sorted(range(len(needles)), key=lambda index: places[index])
    at = 0
    for index in order:
        place = int(places[index] * len(lines))
        found += [*lines[at:place], needles[index]]
        at = place
    return [*found, *lines[at:]]


def join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def make_uuid(rng: Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


NEEDLES = {
    "niah_single_1": Needles("a number for a city, in a line of noise that repeats", 16, haystack="noise"),
    "niah_single_2": Needles("a number for a city, in text", 16),
    "niah_single_3": Needles("a uuid for a city, in text", 48, is_uuid=True),
    "niah_multikey_1": Needles("four cities with a number, one asked for, in text", 16, num_keys=4),
    "niah_multikey_2": Needles("nothing but such needles, one asked for", 16, haystack="needles"),
    "niah_multikey_3": Needles("nothing but uuids for uuids", 48, haystack="needles", is_uuid=True),
    "niah_multivalue": Needles("four numbers for a city, all asked for, in text", 64, num_values=4),
    "niah_multiquery": Needles("four cities with a number, all asked for", 64, num_keys=4, num_asked=4),
}


@dataclass(frozen=True)
class Turns(Task):
    """`num_turns` needles in text, asked for one after the other: those before the last stand there with their right
    answers. Under P2 all of them go through decode steps. Documents take each number of turns equally often."""

    num_turns: int = 8

    def write(self, num_chars: int, rng: Random, filler: Filler) -> Text:
        cities = rng.sample(CITIES, self.num_turns)
        values = [str(rng.randrange(1_000_000, 10_000_000)) for _ in cities]
        places, turn = [rng.random() for _ in cities], rng.randrange(self.num_turns)
        needles = [needle(city, value) for city, value in zip(cities, values, strict=True)]
        room = num_chars - sum(len(text) + 1 for text in needles)
        context = " ".join(insert(filler.sentences(room, Random(rng.random())), needles, places))
        asked = [
            f"{question_of(city, 'number', 1)} {value}.\n" for city, value in zip(cities, values, strict=True)
        ]
        question = "".join(asked[:turn]) + question_of(cities[turn], "number", 1)
        return Text(context + "\n", question, (values[turn],), f"turn {1 + turn}")


TURNS = {"turns": Turns("the last of up to eight questions in turn on one text", 16)}
