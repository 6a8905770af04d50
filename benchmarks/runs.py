"""What the CPU comparison measures: prompts that a rival's process answers, and how its runs are put together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median


@dataclass(frozen=True)
class Task:
    """What a rival's process is asked to do; it travels as JSON.

    `prompts` are answered one after the other, `num_steps` decode steps each; all of one length, none a repetition.
    """

    model: str
    prompts: tuple[tuple[int, ...], ...]
    num_steps: int
    num_threads: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        fields = json.loads(text)
        return cls(**{**fields, "prompts": tuple(tuple(prompt) for prompt in fields["prompts"])})


@dataclass(frozen=True)
class Answer:
    """One prompt's tokens, and when they came: milliseconds to the first token, then from token to token."""

    token_ids: tuple[int, ...]
    ttft_ms: float
    gaps_ms: tuple[float, ...]

    @classmethod
    def from_times(cls, token_ids: Sequence[int], begin_s: float, times_s: Sequence[float]) -> Answer:
        """From clock readings in seconds: the start and each token's arrival."""
        gaps = (1e3 * (after - before) for before, after in pairwise(times_s))
        return cls(tuple(token_ids), 1e3 * (times_s[0] - begin_s), tuple(gaps))


@dataclass(frozen=True)
class Run:
    """One process of a rival at one length. `loaded_mib` is resident before the first prompt, `peak_mib` the peak."""

    rival: str
    length: int
    answers: tuple[Answer, ...]
    loaded_mib: float
    peak_mib: float

    @classmethod
    def from_json(cls, text: str) -> Run:
        fields = json.loads(text)
        answers = (
            Answer(tuple(answer["token_ids"]), answer["ttft_ms"], tuple(answer["gaps_ms"]))
            for answer in fields["answers"]
        )
        return cls(**{**fields, "answers": tuple(answers)})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Timing:
    """A rival at one length, over all its processes and prompts.

    `ttft_ms` and `step_ms` are medians with their smallest and largest value. The first gap is kept apart as
    `second_token_ms`: it holds the wait for an index. A run's step is the median of its other gaps.
    """

    rival: str
    length: int
    n: int
    ttft_ms: float
    ttft_range_ms: tuple[float, float]
    second_token_ms: float
    step_ms: float
    step_range_ms: tuple[float, float]
    loaded_mib: float
    peak_mib: float


def summarize(runs: Sequence[Run]) -> Timing:
    """`runs` are of one rival and length, at least one; every answer has at least three tokens."""
    answers = [answer for run in runs for answer in run.answers]
    ttft = [answer.ttft_ms for answer in answers]
    steps = [median(answer.gaps_ms[1:]) for answer in answers]
    return Timing(
        rival=runs[0].rival,
        length=runs[0].length,
        n=len(answers),
        ttft_ms=median(ttft),
        ttft_range_ms=(min(ttft), max(ttft)),
        second_token_ms=median(answer.gaps_ms[0] for answer in answers),
        step_ms=median(steps),
        step_range_ms=(min(steps), max(steps)),
        loaded_mib=median(run.loaded_mib for run in runs),
        peak_mib=max(run.peak_mib for run in runs),
    )


def agreement(ours: Sequence[Run], theirs: Sequence[Run]) -> float:
    """Share of prompts to which both gave the same tokens."""
    pairs = [
        (one.token_ids, other.token_ids)
        for our, their in zip(ours, theirs, strict=True)
        for one, other in zip(our.answers, their.answers, strict=True)
    ]
    return sum(one == other for one, other in pairs) / len(pairs)
