"""Values to look up: InfiniteBench's retrieval tasks and Math.Find, and RULER's variable tracking."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from carrel.evaluation.scoring import first_integer, first_number
from carrel.evaluation.tasks.base import Task, Text
from carrel.evaluation.tasks.filler import Filler
from carrel.evaluation.tasks.needles import NOISE, insert, make_uuid

PAIR_CHARS = 82
NUM_DEPTHS = 59


@dataclass(frozen=True)
class HiddenNumber(Task):
    """A number in noise, said twice. With `num_repeats` so many of its digits are said again beside themselves."""

    name: str = "pass key"
    num_digits: int = 5
    num_repeats: int = 0

    def write(self, num_chars: int, rng: Random, filler: Filler) -> Text:
        digits = [str(rng.randrange(1, 10)), *(str(rng.randrange(10)) for _ in range(self.num_digits - 1))]
        for _ in range(self.num_repeats):
            place = rng.randrange(len(digits))
            digits.insert(place, digits[place])
        value, depth = "".join(digits), rng.randrange(NUM_DEPTHS) / NUM_DEPTHS
        line = f"The {self.name} is {value}. Remember it. {value} is the {self.name}."
        lines = insert([NOISE] * max(1, (num_chars - len(line)) // (len(NOISE) + 1)), [line], [depth])
        question = f"What is the {self.name}? The {self.name} is"
        return Text("\n".join(lines) + "\n", question, (value,), f"depth {int(10 * depth)}")


@dataclass(frozen=True)
class KeyValues(Task):
    """JSON of uuids for uuids, one of which is asked for."""

    def write(self, num_chars: int, rng: Random, filler: Filler) -> Text:
        depth = rng.random()
        asked, value = make_uuid(rng), make_uuid(rng)
        others = [(make_uuid(rng), make_uuid(rng)) for _ in range(max(1, num_chars // PAIR_CHARS - 1))]
        place = int(depth * (1 + len(others)))
        pairs = dict([*others[:place], (asked, value), *others[place:]])
        context = f"JSON data:\n{json.dumps(pairs)}\n\n"
        return Text(
            context, f'Key: "{asked}"\nThe value of this key is: "', (value,), f"depth {int(10 * depth)}"
        )


LOOKUP = {
    "passkey": HiddenNumber("a number of five digits in noise", 12, first_integer),
    "number": HiddenNumber(
        "a number of ten digits in noise, five of them repeated",
        16,
        first_integer,
        "sequence of digits",
        5,
        5,
    ),
    "kv_retrieval": KeyValues("a value of a JSON object of uuids", 48),
}


NAME_LETTERS = 5


@dataclass(frozen=True)
class Tracking(Task):
    """A chain of `num_hops` assignments after the first, in order, in noise; an example of such a chain before it."""

    num_hops: int = 4

    def write(self, num_chars: int, rng: Random, filler: Filler) -> Text:
        shown, shown_names = self._document(0, rng)
        shown_value = shown_names.pop()
        document, names = self._document(num_chars - len(shown), rng)
        value = names.pop()
        example = f"{shown}\n{self._question(shown_value)} {', '.join(shown_names)}.\n\n"
        return Text(f"{example}{document}\n", self._question(value), tuple(names), "chain")

    def _document(self, num_chars: int, rng: Random) -> tuple[str, list[str]]:
        """The text; the names of its chain, and the value behind them."""
        names = [
            "".join(rng.choices(string.ascii_uppercase, k=NAME_LETTERS)) for _ in range(1 + self.num_hops)
        ]
        value = str(rng.randrange(10_000, 100_000))
        lines = chain_lines(names, value)
        places = sorted(rng.random() for _ in lines)
        noise = [NOISE] * max(len(lines), num_chars // (len(NOISE) + 1))
        return "\n".join(insert(noise, lines, places)), [*names, value]

    def _question(self, value: str) -> str:
        return (
            f"Question: which variables are assigned the value {value} in the text above, directly or through others? "
            f"There are {1 + self.num_hops}. Answer:"
        )


def chain_lines(names: Sequence[str], value: str) -> list[str]:
    """The assignments of a chain, the first of `value`."""
    return [f"VAR {name} = {f'VAR {names[at - 1]}' if at else value}" for at, name in enumerate(names)]


TRACKING = {"vt": Tracking("five variables of a chain of assignments", 40)}


NUMBER_CHARS = 3.9
RANKS = (
    "largest",
    "second largest",
    "third largest",
    "smallest",
    "second smallest",
    "third smallest",
    "median",
)


@dataclass(frozen=True)
class FindNumber(Task):
    """Numbers from 0 to 99 with one bound moved, so that the extremes differ from list to list."""

    def write(self, num_chars: int, rng: Random, filler: Filler) -> Text:
        asked, is_upper, shift = rng.choice(RANKS), rng.random() < 0.5, rng.randrange(20)
        low, high = (0, 99 - shift) if is_upper else (shift, 99)
        numbers = [rng.randint(low, high) for _ in range(max(20, int(num_chars / NUMBER_CHARS)))]
        question = (
            f"Question: what is the {asked} of the numbers in the list above? Answer: the {asked} number is"
        )
        return Text(f"{numbers}\n", question, (f"{ranked(numbers, asked):g}",), asked)


def ranked(numbers: list[int], rank: str) -> float:
    """The number of this rank; equal ones count once, but for the median."""
    if rank == "median":
        return median(numbers)
    order = sorted(set(numbers), reverse=rank.endswith("largest"))
    return order[{"second": 1, "third": 2}.get(rank.split()[0], 0)]


ARITHMETIC = {"math_find": FindNumber("a number of a list by its rank", 8, first_number)}
