"""Few-shot classification: what a question asks for, learned from the examples that fill the context."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from carrel.evaluation.tasks.base import Task, Text
from carrel.evaluation.tasks.filler import Filler
from carrel.evaluation.tasks.needles import CITIES
from carrel.evaluation.words import ANIMALS, FIRST_NAMES, MATERIALS, SURNAMES, THINGS

# the label, and how its questions are put
CLASSES = {
    "number": ("How many {animal}s live near {city}?", "How much does a {material} {thing} cost in {city}?"),
    "date": ("When did {first} {last} move to {city}?", "In which year was the {thing} of {city} stolen?"),
    "person": (
        "Who sold the {material} {thing} in {city}?",
        "Which painter lived in {city} with a {animal}?",
    ),
    "place": ("Where did {first} {last} buy the {thing}?", "In which country is {city}?"),
    "animal": ("What kind of pet does {first} {last} keep?", "Which bird builds its nest on a {thing}?"),
    "reason": ("Why did {first} {last} leave {city}?", "Why is a {thing} often of {material}?"),
}
EXAMPLE_CHARS = 62


@dataclass(frozen=True)
class Labels(Task):
    """Examples of every class in random order, and one more without its label."""

    def write(self, num_chars: int, rng: Random, filler: Filler) -> Text:
        label, question = _draw(rng)
        examples = [_draw(rng) for _ in range(max(2 * len(CLASSES), num_chars // EXAMPLE_CHARS))]
        context = "".join(f"Question: {text}\nType: {name}\n\n" for name, text in examples)
        return Text(context, f"Question: {question}\nType:", (label,), label)


def _draw(rng: Random) -> tuple[str, str]:
    label = rng.choice(list(CLASSES))
    pools = {
        "animal": ANIMALS,
        "thing": THINGS,
        "material": MATERIALS,
        "first": FIRST_NAMES,
        "last": SURNAMES,
    }
    words = {name: rng.choice(pool.split()) for name, pool in pools.items()}
    return label, rng.choice(CLASSES[label]).format(city=rng.choice(CITIES), **words)


LABELS = {"labels": Labels("the type of a question, by examples", 4)}
