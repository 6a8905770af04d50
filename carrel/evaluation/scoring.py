"""Scores answers: exact match of the whole answer, with a confidence interval."""

from __future__ import annotations

import math
from dataclasses import dataclass


def normalize(answer: str) -> str:
    """The answer without surrounding white space and final full stop."""
    return answer.strip().removesuffix(".").rstrip()


def exact_match(prediction: str, answer: str) -> bool:
    """Whether the whole prediction is the answer, surrounding white space and a final full stop aside."""
    return normalize(prediction) == normalize(answer)


@dataclass(frozen=True)
class Rate:
    """A share of successes with its 95 % Wilson interval."""

    num_correct: int
    n: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_correct <= self.n or self.n == 0:
            raise ValueError(f"{self.num_correct} of {self.n} is no rate: need 0 <= num_correct <= n, n > 0")

    @property
    def value(self) -> float:
        """The share itself."""
        return self.num_correct / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end of the 95 % Wilson interval."""
        z = 1.959964
        share, scale = self.value, 1 + z * z / self.n
        centre = (share + z * z / (2 * self.n)) / scale
        margin = z / scale * math.sqrt(share * (1 - share) / self.n + z * z / (4 * self.n * self.n))
        return max(0.0, centre - margin), min(1.0, centre + margin)
