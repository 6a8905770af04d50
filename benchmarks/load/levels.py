"""Levels of load on a server, and what its answers took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Any


@dataclass(frozen=True)
class Level:
    """One steady load: `concurrency` clients that ask again as soon as they are answered, `num_requests` in all.

    policy, budget: None leaves them to the server. num_shared_tokens: of each prompt's start, the same in all.
    """

    policy: str | None
    budget: float | int | None
    concurrency: int
    prompt_tokens: int
    max_tokens: int
    num_requests: int
    num_shared_tokens: int = 0

    def __str__(self) -> str:
        policy = self.policy or "the server's policy"
        return f"{policy}, {self.prompt_tokens} + {self.max_tokens} tokens, {self.concurrency} at once"


@dataclass(frozen=True)
class RequestResult:
    """One answered request; times in seconds. carrel: its `usage.carrel`, empty where the server sends none. gaps_s:
    between the pieces of its stream."""

    ttft_s: float
    last_s: float
    end_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    carrel: dict[str, Any]
    gaps_s: tuple[float, ...] = ()

    @property
    def num_pieces(self) -> int:
        """That the stream came in, at least one."""
        return 1 + len(self.gaps_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of each token after the first."""
        later = self.completion_tokens - 1
        return (self.last_s - self.ttft_s) / later if later > 0 else None


@dataclass(frozen=True)
class Percentiles:
    """Of many requests."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Percentiles | None:
        """None without samples."""
        values = sorted(samples)
        if len(values) < 2:
            return cls(values[0], values[0], values[0]) if values else None
        cuts = quantiles(values, n=100, method="inclusive")
        return cls(cuts[49], cuts[94], cuts[98])


@dataclass(frozen=True)
class ServeRow:
    """A level's outcome. Throughputs count completed requests over the level's duration.

    cached_tokens, attended_tokens, hit_rate, bytes_moved: means over requests of what the server tells; None where it
    does not. error: of the first of `num_failed` requests. num_pieces: of all streams; older JSON has it not.
    """

    level: Level
    num_done: int
    num_failed: int
    error: str | None
    duration_s: float
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    latency_ms: Percentiles | None
    prompt_tokens: float | None
    completion_tokens: float | None
    cached_tokens: float | None
    attended_tokens: float | None
    hit_rate: float | None
    bytes_moved: float | None
    num_pieces: int | None = None


def summarize(
    level: Level, results: Sequence[RequestResult], errors: Sequence[str], duration_s: float
) -> ServeRow:
    tpot = [result.tpot_s for result in results]

    def of_carrel(name: str) -> float | None:
        return _mean(result.carrel.get(name) for result in results)

    return ServeRow(
        level=level,
        num_done=len(results),
        num_failed=len(errors),
        error=errors[0] if errors else None,
        duration_s=duration_s,
        output_tokens_per_s=sum(result.completion_tokens for result in results) / duration_s,
        requests_per_s=len(results) / duration_s,
        ttft_ms=Percentiles.of(1e3 * result.ttft_s for result in results),
        tpot_ms=Percentiles.of(1e3 * each for each in tpot if each is not None),
        latency_ms=Percentiles.of(1e3 * result.end_s for result in results),
        prompt_tokens=_mean(result.prompt_tokens for result in results),
        completion_tokens=_mean(result.completion_tokens for result in results),
        cached_tokens=_mean(result.cached_tokens for result in results),
        attended_tokens=of_carrel("attended_tokens"),
        hit_rate=of_carrel("hit_rate"),
        bytes_moved=of_carrel("bytes_moved"),
        num_pieces=sum(result.num_pieces for result in results),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
