"""A question as a worker gets it, with what its answer is held against."""

from __future__ import annotations

from dataclasses import dataclass

from carrel.evaluation.scoring import contained, exact_match


@dataclass(frozen=True)
class Question:
    """One document with its question. `context_ids` is what protocol P2 prefills; both together are the prompt.

    answers: all that are wanted. is_whole: an answer is right only if it is the wanted one and nothing else; otherwise
    when it contains all.
    """

    index: int
    kind: str
    answers: tuple[str, ...]
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    max_tokens: int
    is_whole: bool = False

    def score(self, prediction: str) -> float:
        """The share of the answers that the prediction contains."""
        return contained(prediction, self.answers)

    def is_right(self, prediction: str) -> bool:
        if self.is_whole:
            return exact_match(prediction, self.answers[0])
        return self.score(prediction) == 1.0
