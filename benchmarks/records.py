"""What a benchmark measures, and how runs of one rival are put together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, TypeVar, get_args, get_type_hints

R = TypeVar("R")


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


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True)
class Spread:
    """Repeats of one measurement: median, 10th and 90th percentile, and how many; the field's name has the unit."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """Of at least one sample."""
        values = sorted(samples)
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        cuts = quantiles(values, n=10, method="inclusive")
        return cls(median(values), cuts[0], cuts[-1], len(values))

    def scaled(self, factor: float) -> Spread:
        """In another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.n)

    @classmethod
    def over(cls, rounds: Sequence[Spread]) -> Spread:
        """Of several rounds: the median of the medians, and the widest bounds."""
        return cls(
            median(one.median for one in rounds),
            min(one.low for one in rounds),
            max(one.high for one in rounds),
            sum(one.n for one in rounds),
        )


@dataclass(frozen=True)
class DecodeCase:
    """What a rival decodes: `batch` sequences of `context` tokens each, `steps` timed steps.

    policy, budget_tokens: what Carrel attends to; other rivals attend to everything, and their policy is "full" with no
    budget. hit_rate: share of the selected tokens that the step before selected too, replayed (benchmarks/traces.py);
    None: what random weights select. gpu_memory_limit: bytes of the device that may be used; None: all. trace: the file
    of the recorded selection that is replayed, and that hit_rate is of; None: a synthetic one is.
    """

    shape: str
    policy: str
    budget_tokens: int | None
    batch: int
    context: int
    hit_rate: float | None
    gpu_memory_limit: int | None
    steps: int
    trace: str | None = None

    def __str__(self) -> str:
        replayed = None if self.hit_rate is None else f"hit rate {self.hit_rate}"
        if self.trace is not None:
            replayed = f"{replayed} of {Path(self.trace).name}"
        parts = (f"{self.context}x{self.batch}", *_attending(self), replayed, _limit(self.gpu_memory_limit))
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class KernelTime:
    """One kernel's launches of a step, summed: microseconds on the device."""

    name: str
    launches: int
    us: float


@dataclass(frozen=True)
class DecodeFigures:
    """What decoding cost. device_bytes: peak, weights included. host_bytes: KV cache in host memory.

    bytes_moved: from host to device in a step, over all sequences. hit_rate: share of the selected tokens found in the
    hot cache; None where nothing is selected. attended_tokens: per KV head, layer and step. kernels: of one more step,
    under the profiler.
    """

    step_ms: Spread
    device_bytes: int
    host_bytes: int = 0
    bytes_moved: float = 0.0
    hit_rate: float | None = None
    attended_tokens: float | None = None
    kernels: tuple[KernelTime, ...] = ()

    def __str__(self) -> str:
        return f"{self.step_ms.median:.3f} ms a step"

    @classmethod
    def over(cls, rounds: Sequence[DecodeFigures]) -> DecodeFigures:
        """Of several rounds of one case, at least one."""
        hit_rates = [one.hit_rate for one in rounds if one.hit_rate is not None]
        return cls(
            Spread.over([one.step_ms for one in rounds]),
            max(one.device_bytes for one in rounds),
            max(one.host_bytes for one in rounds),
            fmean(one.bytes_moved for one in rounds),
            fmean(hit_rates) if hit_rates else None,
            rounds[0].attended_tokens,
            rounds[0].kernels,
        )


@dataclass(frozen=True)
class PrefillCase:
    """What a rival prefills: one prompt of `context` random tokens, `repeats` times. Fields as of DecodeCase."""

    shape: str
    policy: str
    budget_tokens: int | None
    context: int
    gpu_memory_limit: int | None
    repeats: int

    def __str__(self) -> str:
        parts = (f"{self.context}", *_attending(self), _limit(self.gpu_memory_limit))
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class PrefillFigures:
    """What a prompt cost: time to the first and to the second token (which waits for an index), and peak memory."""

    ttft_ms: Spread
    tt2t_ms: Spread | None
    device_bytes: int
    host_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.ttft_ms.median:.1f} ms to the first token"

    @classmethod
    def over(cls, rounds: Sequence[PrefillFigures]) -> PrefillFigures:
        """Of several rounds of one case, at least one."""
        second = [one.tt2t_ms for one in rounds if one.tt2t_ms is not None]
        return cls(
            Spread.over([one.ttft_ms for one in rounds]),
            Spread.over(second) if second else None,
            max(one.device_bytes for one in rounds),
            max(one.host_bytes for one in rounds),
        )


@dataclass(frozen=True)
class Report:
    """One run of a benchmark, as its JSON has it.

    about: command, machine, versions, commit, date. shapes: of the models by name, or what is served. rows: records.
    """

    benchmark: str
    about: dict[str, Any]
    shapes: dict[str, Any]
    rows: tuple[Any, ...]

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))


def revive(kind: type[R], fields: dict[str, Any]) -> R:
    """The dataclass `kind` from its `asdict`, dataclasses inside it too."""
    hints = get_type_hints(kind)
    values = {}
    for name, value in fields.items():
        inner = next((each for each in (hints[name], *get_args(hints[name])) if is_dataclass(each)), None)
        if not isinstance(inner, type):
            values[name] = value
        elif isinstance(value, dict):
            values[name] = revive(inner, value)
        else:
            values[name] = tuple(revive(inner, each) for each in value) if isinstance(value, list) else value
    return kind(**values)


def _attending(case: DecodeCase | PrefillCase) -> tuple[str, str]:
    return case.policy, "" if case.budget_tokens is None else f"k={case.budget_tokens}"


def _limit(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"within {num_bytes / 2**30:.4g} GiB"
