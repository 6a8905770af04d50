"""What Carrel must reach against the minimal dense loop of the same run, with Llama-3.1-8B's shape on one H200."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.records import DecodeCase

SHAPE = "llama-3.1-8b"


@dataclass(frozen=True)
class DecodeTarget:
    """At least this ratio of throughputs. context, batch: None for any. is_limited: under a memory limit."""

    policy: str
    least: float
    hoped: float
    context: int | None = None
    batch: int | None = None
    hit_rate: float | None = None
    is_limited: bool = False

    def is_of(self, case: DecodeCase) -> bool:
        same = case.shape == SHAPE and case.policy == self.policy and case.hit_rate == self.hit_rate
        same = same and case.trace is None
        placed = self.context in (None, case.context) and self.batch in (None, case.batch)
        return same and placed and self.is_limited == (case.gpu_memory_limit is not None)


DECODE_TARGETS = (
    DecodeTarget("full", least=1 / 1.10, hoped=1.0),
    DecodeTarget("pqcache", 3.0, 4.5, context=32768, batch=24),
    DecodeTarget("pqcache", 3.5, 5.0, context=131072, batch=6),
    DecodeTarget("pqcache", 3.0, 4.0, context=131072, batch=6, hit_rate=0.9, is_limited=True),
)


def decode_verdicts(case: DecodeCase, ratio: float) -> Iterator[str]:
    """How the case fared where there is a target for it."""
    for target in DECODE_TARGETS:
        if target.is_of(case):
            met = "met" if ratio >= target.least else "MISSED"
            hope = ", hoped for: reached" if ratio >= target.hoped else ""
            yield (
                f"{case}: {ratio:.2f} times the throughput of the minimal dense loop "
                f"(target: at least {target.least:.2f}): {met}{hope}"
            )
