"""The records of `carrel bench` as their JSON has them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, TypeVar, get_args, get_type_hints

from carrel.evaluation.about import write_whole
from carrel.tables import interval

R = TypeVar("R")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """By `write_whole`."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True)
class Spread:
    """Repeats of one measurement: median, 10th and 90th percentile, and how many; the field's name has the unit."""

    median: float
    low: float
    high: float
    n: int

    def text(self, digits: int) -> str:
        return interval(self.median, self.low, self.high, digits)

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """Return the spread of at least one sample."""
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
        """Join several rounds: the median of the medians, and the widest bounds."""
        return cls(
            median(one.median for one in rounds),
            min(one.low for one in rounds),
            max(one.high for one in rounds),
            sum(one.n for one in rounds),
        )


@dataclass(frozen=True)
class DecodeCase:
    """A case of a decode benchmark: `batch` sequences of `context` tokens each, `steps` timed steps.

    policy, budget_tokens: what Carrel attends to; other rivals attend to everything, and their policy is "full" with no
    budget. hit_rate: share of the selected tokens that the step before selected too, replayed (benchmarks/traces.py);
    None: what random weights select. gpu_memory_limit: bytes of the device that may be used; None: all. profile: the
    folder that gets a trace of one step; None: none is written. quantization: of Carrel's weights; None: 16 bits.
    """

    shape: str
    policy: str
    budget_tokens: int | None
    batch: int
    context: int
    hit_rate: float | None
    gpu_memory_limit: int | None
    steps: int
    profile: str | None = None
    quantization: str | None = None

    def __str__(self) -> str:
        replayed = None if self.hit_rate is None else f"hit rate {self.hit_rate}"
        parts = (
            f"{self.context}x{self.batch}",
            *_attending(self),
            self.quantization,
            replayed,
            _limit(self.gpu_memory_limit),
        )
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class KernelTime:
    """One kernel's launches of a step, summed: microseconds on the device."""

    name: str
    launches: int
    us: float


@dataclass(frozen=True)
class DecodeFigures:
    """The cost of decoding. device_bytes: peak, weights included. host_bytes: KV cache in host memory.

    bytes_moved: from host to device in a step, over all sequences. hit_rate: share of the selected tokens found in the
    hot cache; None where nothing is selected. attended_tokens: per KV head, layer and step. kernels: of one more step,
    under the profiler. mean_ms: of a step, over whole intervals; where a policy compresses again in some steps, which
    the median does not have.
    """

    step_ms: Spread
    device_bytes: int
    host_bytes: int = 0
    bytes_moved: float = 0.0
    hit_rate: float | None = None
    attended_tokens: float | None = None
    kernels: tuple[KernelTime, ...] = ()
    mean_ms: float | None = None

    def __str__(self) -> str:
        return f"{self.ms_per_step:.3f} ms a step"

    @property
    def ms_per_step(self) -> float:
        """Milliseconds by which a step counts."""
        return self.step_ms.median if self.mean_ms is None else self.mean_ms

    @classmethod
    def over(cls, rounds: Sequence[DecodeFigures]) -> DecodeFigures:
        """Join the rounds of one case, at least one."""
        hit_rates = [one.hit_rate for one in rounds if one.hit_rate is not None]
        means = [one.mean_ms for one in rounds if one.mean_ms is not None]
        return cls(
            Spread.over([one.step_ms for one in rounds]),
            max(one.device_bytes for one in rounds),
            max(one.host_bytes for one in rounds),
            fmean(one.bytes_moved for one in rounds),
            fmean(hit_rates) if hit_rates else None,
            rounds[0].attended_tokens,
            rounds[0].kernels,
            median(means) if means else None,
        )


@dataclass(frozen=True)
class PrefillCase:
    """A case of a prefill benchmark: one prompt of `context` random tokens, `repeats` times. Fields as of
    DecodeCase."""

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
    """The cost of a prompt: time to the first and to the second token (which waits for an index), and peak memory."""

    ttft_ms: Spread
    tt2t_ms: Spread | None
    device_bytes: int

    def __str__(self) -> str:
        return f"{self.ttft_ms.median:.1f} ms to the first token"

    @classmethod
    def over(cls, rounds: Sequence[PrefillFigures]) -> PrefillFigures:
        """Join the rounds of one case, at least one."""
        seconds = [one.tt2t_ms for one in rounds if one.tt2t_ms is not None]
        return cls(
            Spread.over([one.ttft_ms for one in rounds]),
            Spread.over(seconds) if seconds else None,
            max(one.device_bytes for one in rounds),
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
    """The dataclass `kind` from its `asdict`, nested dataclasses included. Fields that it no longer has are dropped."""
    hints = get_type_hints(kind)
    values = {}
    for name, value in fields.items():
        if name not in hints:
            continue
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
