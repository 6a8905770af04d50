"""Records that a task writes: a text, the questions about it, and the expected answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random

from carrel.evaluation.tasks.filler import Filler


@dataclass(frozen=True)
class Text:
    """A context and what stands after it, which ends where the answer begins. `answers` are all wanted. `kind`: what
    the documents of one task differ in."""

    context: str
    question: str
    answers: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class Task(ABC):
    """Writes documents of any length. `answer_tokens`: room for an answer, which a cell's length counts too."""

    summary: str
    answer_tokens: int

    @abstractmethod
    def write(self, num_chars: int, rng: Random, filler: Filler) -> Text:
        """A document of about so many characters, or the shortest that there is; `rng` decides everything else."""
