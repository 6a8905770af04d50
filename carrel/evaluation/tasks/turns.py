"""Several questions in turn on one context: what was kept for the first must serve the last."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from carrel.evaluation.tasks.base import Task, Text
from carrel.evaluation.tasks.filler import Filler
from carrel.evaluation.tasks.needles import CITIES, insert, needle, question_of


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
