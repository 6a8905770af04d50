"""Outcome of a soak: answers, errors, times to first tokens around each fault, and growth."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.load.questions import Question

# Wrong answers that are told one by one.
MOST_TOLD = 50


@dataclass(frozen=True)
class Meter:
    """One gauge: when a quarter of the time was over, its most from then on, and its last, with nobody asking."""

    name: str
    settled: float
    most: float
    last: float


@dataclass(frozen=True)
class Waits:
    """Seconds from a question to its first token, those lost on the way to errors included."""

    n: int
    median_s: float
    p99_s: float
    most_s: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Waits | None:
        """By the nearest rank. None of none."""
        waits = sorted(seconds)
        if not waits:
            return None
        return cls(
            len(waits), waits[(len(waits) - 1) // 2], waits[math.ceil(0.99 * len(waits)) - 1], waits[-1]
        )


@dataclass(frozen=True)
class Struck:
    """A fault: at_s after the start `who` was struck, at ready_s all served again (None: not in time).

    during: of the questions that waited for a first token then; before: of those since the last pause; after: of those
    until the next one. num_ended: requests that ended by an error meanwhile.
    """

    who: str
    how: str
    at_s: float
    ready_s: float | None = None
    num_ended: int = 0
    before: Waits | None = None
    during: Waits | None = None
    after: Waits | None = None


@dataclass(frozen=True)
class Ending:
    """How many requests ended by an error with this code; `none` where the connection broke."""

    code: str
    count: int


@dataclass(frozen=True)
class Wrong:
    """An answer that was not what the same question got alone: of a prompt of so many tokens under a policy (None: the
    server's), at_s after the start; the first token that differed, and how much likelier alone's own was there than the
    second best, in nats (None: no token differed, but their number or the text). is_salted: nobody else could have had
    its prefix."""

    at_s: float
    policy: str | None
    prompt_tokens: int
    is_salted: bool
    token: int
    margin: float | None

    @classmethod
    def of(cls, at_s: float, question: Question, is_salted: bool, token: int, margin: float) -> Wrong:
        """margin: infinite where no token differed."""
        told = round(margin, 3) if math.isfinite(margin) else None
        return cls(round(at_s, 1), question.policy, len(question.prompt), is_salted, token, told)


@dataclass(frozen=True)
class Sample:
    """The gauges at one time; is_idle: all streams had paused."""

    at_s: float
    is_idle: bool
    values: dict[str, float]


@dataclass
class SoakRow:
    """num_differing: answers, or beginnings of answers, that were not what the same question got alone;
    first_difference: where the first of them left it, as a share of the answer; wrong: the first `MOST_TOLD` of them.
    num_tied: those that left it at a near tie, and so differ by rounding; widest_tie: of these, between the two best
    tokens alone, in nats. num_failed: requests that ended by an error while no fault was on; num_ended: while one was.
    load_average: of a minute, (median, most) over the run."""

    num_streams: int
    seconds: float
    num_questions: int
    num_answered: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_differing: int = 0
    num_tied: int = 0
    widest_tie: float | None = None
    first_difference: float | None = None
    wrong: list[Wrong] = field(default_factory=list)
    error: str | None = None
    meters: list[Meter] = field(default_factory=list)
    ran_s: float = 0.0
    num_ended: int = 0
    endings: list[Ending] = field(default_factory=list)
    faults: list[Struck] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    load_average: list[float] = field(default_factory=list)

    def count_wrong(self, wrong: Wrong, num_tokens: int) -> None:
        """An answer that should have been of so many tokens, and was not what it is alone."""
        self.num_differing += 1
        if len(self.wrong) < MOST_TOLD:
            self.wrong.append(wrong)
        earliest = 1.0 if self.first_difference is None else self.first_difference
        self.first_difference = min(earliest, wrong.token / max(1, num_tokens))
