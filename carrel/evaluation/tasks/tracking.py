"""RULER's variable tracking: which names hold a value, through a chain of assignments."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from carrel.evaluation.tasks.base import Task, Text
from carrel.evaluation.tasks.filler import Filler
from carrel.evaluation.tasks.needles import NOISE, insert

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
