"""InfiniteBench's Math.Find: a number of a long list, by its rank."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import median

from carrel.evaluation.scoring import first_number
from carrel.evaluation.tasks.base import Task, Text
from carrel.evaluation.tasks.filler import Filler

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
