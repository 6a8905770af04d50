"""One request of a load, and its outcome."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import quantiles
from typing import Any


@dataclass(frozen=True)
class Asked:
    """Options of a request. policy, budget: None leaves them to the server."""

    policy: str | None
    budget: float | int | None
    max_tokens: int


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
        """The pieces of its stream, at least one."""
        return 1 + len(self.gaps_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of each token after the first."""
        later = self.completion_tokens - 1
        return (self.last_s - self.ttft_s) / later if later > 0 else None


@dataclass(frozen=True)
class Percentiles:
    """Percentiles over many requests."""

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
