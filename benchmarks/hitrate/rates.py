"""The records of the hit rate benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from benchmarks.hitrate.caches import clock_hits, lru_hits
from benchmarks.hitrate.recorder import Recording
from benchmarks.traces import RecordedTrace


@dataclass(frozen=True)
class HitRateCase:
    """`documents` of `context` tokens each, and `steps` tokens more that are decoded. budget: a share, or tokens."""

    policy: str
    budget: float | int
    context: int
    documents: int
    steps: int

    def __str__(self) -> str:
        return f"{self.context}x{self.documents} {self.policy} {self.budget}"

    @property
    def budget_text(self) -> str:
        return f"{self.budget:.3g}" if isinstance(self.budget, float) else str(self.budget)


@dataclass(frozen=True)
class HitRateRow:
    """A case and a size of the hot cache. Rates are means over documents, layers, KV heads and steps.

    num_selected: K. overlap: share of a step's positions that the step before selected too. cache_share: C as it was
    asked for, of the context; cache_tokens: C, never below K. clock, lru: share of the selected positions that are
    resident; settled: in the second half of the steps, when what prefill left no longer counts.
    """

    case: HitRateCase
    budget_tokens: int
    num_selected: int
    overlap: float
    cache_share: float
    cache_tokens: int
    clock: float
    lru: float
    clock_settled: float
    lru_settled: float


def rows_of(case: HitRateCase, recording: Recording, shares: Sequence[float]) -> list[HitRateRow]:
    """A row for each size."""
    request = recording.request
    num_slots = [request.num_slots(share) for share in shares]
    clock, lru = (hits(recording.positions, request, num_slots) for hits in (clock_hits, lru_hits))
    overlap = trace_of(recording).hit_rate
    return [
        HitRateRow(
            case,
            recording.budget_tokens,
            request.num_selected,
            round(overlap, 4),
            share,
            request.cache_tokens(share),
            *(round(rate, 4) for rate in (*_rates(clock[size], lru[size]),)),
        )
        for size, share in enumerate(shares)
    ]


def trace_of(recording: Recording) -> RecordedTrace:
    return RecordedTrace(recording.positions, recording.request.context)


def _rates(*hits: Tensor) -> list[float]:
    """Over all steps, then over their second half."""
    whole = [float(each.mean()) for each in hits]
    return whole + [settled(each) for each in hits]


def settled(hits: Tensor) -> float:
    """Of hits [steps]: the mean of the second half, when what prefill left no longer counts."""
    return float(hits[hits.shape[0] // 2 :].mean())
