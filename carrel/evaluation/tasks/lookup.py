"""InfiniteBench's retrieval tasks: a pass key, a number with repeated digits, and a value of many."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from carrel.evaluation.scoring import first_integer
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
