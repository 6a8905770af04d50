"""Scores answers: exact match of the whole answer, or how much of what is wanted it holds, with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from carrel.tables import interval

NUM_RESAMPLES = 2000
SEED = 0
CHUNK = 500


def normalize(answer: str) -> str:
    """The answer without surrounding white space and final full stop."""
    return answer.strip().removesuffix(".").rstrip()


def exact_match(prediction: str, answer: str) -> bool:
    """Return whether the whole prediction is the answer, ignoring outer white space and a final full stop."""
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


@dataclass(frozen=True)
class Mean:
    """A mean over `n` documents with its 95 % bootstrap interval, which is a point where all are equal."""

    value: float
    low: float
    high: float
    n: int

    def text(self, digits: int = 2) -> str:
        return interval(self.value, self.low, self.high, digits)


def contained(prediction: str, answers: Sequence[str]) -> float:
    """The share of the answers that the prediction contains, whatever stands around them; case aside."""
    said = prediction.lower()
    return sum(answer.lower() in said for answer in answers) / len(answers)


def mean(values: Iterable[float | None]) -> Any:
    """Return the mean of the known values; None where no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def bootstrap(values: Sequence[float]) -> Mean:
    """The mean of one value a document, at least one, and its percentile interval over resampled documents."""
    taken = np.asarray(values, dtype=float)
    # How often each different value is drawn is all that counts, and scores have few.
    different, counts = np.unique(taken, return_counts=True)
    rng, means = np.random.default_rng(SEED), []
    for _ in range(0, NUM_RESAMPLES, CHUNK):
        drawn = rng.multinomial(len(taken), counts / len(taken), size=CHUNK)
        means.append(drawn @ different / len(taken))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Mean(float(taken.mean()), float(low), float(high), len(taken))


def paired(ours: dict[int, float], theirs: dict[int, float]) -> Mean | None:
    """The mean difference over the documents, by index, that both were asked; None where there are none."""
    both = sorted(ours.keys() & theirs.keys())
    return bootstrap([ours[index] - theirs[index] for index in both]) if both else None
