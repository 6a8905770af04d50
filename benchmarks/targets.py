"""Targets with Llama-3.1-8B's shape on one H200, against rivals of the same run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.figures import DecodeCase, PrefillCase

SHAPE = "llama-3.1-8b"
# Waiting for the index may cost this much of the time to the second token under dense attention.
TT2T = 1.05


@dataclass(frozen=True)
class DecodeTarget:
    """The least ratio of throughputs to the minimal dense loop. context, batch: None for any. is_limited: under a
    memory limit."""

    policy: str
    least: float
    context: int | None = None
    batch: int | None = None
    hit_rate: float | None = None
    is_limited: bool = False

    def is_of(self, case: DecodeCase) -> bool:
        same = case.shape == SHAPE and case.policy == self.policy and case.hit_rate == self.hit_rate
        placed = self.context in (None, case.context) and self.batch in (None, case.batch)
        return same and placed and self.is_limited == (case.gpu_memory_limit is not None)


DECODE_TARGETS = (
    DecodeTarget("full", least=1 / 1.10),
    DecodeTarget("pqcache", 3.0, context=32768, batch=24),
    DecodeTarget("pqcache", 3.5, context=131072, batch=6),
    DecodeTarget("pqcache", 3.0, context=131072, batch=6, hit_rate=0.9, is_limited=True),
)


def decode_verdicts(case: DecodeCase, ratio: float | None) -> Iterator[str]:
    """Verdicts on a case that there are targets for. ratio: of throughputs, to the minimal dense loop."""
    for target in DECODE_TARGETS:
        if ratio is not None and target.is_of(case):
            yield (
                f"{case}: {ratio:.2f} times the throughput of the minimal dense loop "
                f"(target: at least {target.least:.2f}): {_met(ratio >= target.least)}"
            )


def second_token_verdict(case: PrefillCase, ratio: float) -> str:
    """ratio: of the time to the second token to that under dense attention."""
    return (
        f"{case}: {ratio:.2f} of the time to the second token of carrel full "
        f"(target: at most {TT2T:.2f}): {_met(ratio <= TT2T)}"
    )


def _met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"
