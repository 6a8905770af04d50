"""Questions about made-up facts in text, as a reader would put them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from carrel.evaluation import facts
from carrel.evaluation.tasks.base import Task, Text
from carrel.evaluation.tasks.filler import Filler
from carrel.evaluation.tasks.needles import insert
from carrel.evaluation.words import pools


@dataclass(frozen=True)
class Reading(Task):
    """`num_facts` facts, of which one is asked for; `mixed` asks the same of carrel-nano, in the words of its chats."""

    num_facts: int = 16

    def write(self, num_chars: int, rng: Random, filler: Filler) -> Text:
        drawn = facts.mixed(self.num_facts, rng, pools("eval"))
        asked, places = rng.choice(drawn), [rng.random() for _ in drawn]
        stated = [" ".join(fact.sentences) for fact in drawn]
        room = num_chars - sum(len(text) + 1 for text in stated)
        context = " ".join(insert(filler.sentences(room, Random(rng.random())), stated, places))
        return Text(context + "\n\n", f"Question: {asked.question}\nAnswer:", (asked.answer,), asked.kind)


READING = {"qa": Reading("one of sixteen facts in text, by a question", 24)}
