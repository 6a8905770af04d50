"""Targets with Llama-3.1-8B's shape on one H200, against rivals of the same run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.figures import DecodeCase, PrefillCase

SHAPE = "llama-3.1-8b"
# The wait for the index may cost this much of the time to the second token under dense attention.
TT2T = 1.05
# Most that compressing or clustering may take of the time to the first token, from this context on (Chelsea, Table 3,
# and ClusterKV, section V-C, have 1 to 2 and 6 to 8 %).
MOST_OWN_SHARE = {"chelsea": 0.08, "clusterkv": 0.08}
LEAST_LONG = 32768
# ClusterKV's clustering takes so many times ProtoKV's compression (ProtoKV, Figure 2a, says up to).
CLUSTERKV_TO_PROTOKV = 3.9


@dataclass(frozen=True)
class DecodeTarget:
    """At least this ratio of throughputs to the minimal dense loop. context, batch: None for any. is_limited: under a
    memory limit."""

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


@dataclass(frozen=True)
class PublishedSpeedup:
    """A paper's decoding, so many times as fast as its own dense attention with this share of the context kept."""

    policy: str
    context: int
    budget_share: float
    ratio: float
    where: str

    def is_of(self, case: DecodeCase) -> bool:
        same = (case.shape, case.policy, case.context) == (SHAPE, self.policy, self.context)
        return same and case.budget_tokens == int(self.budget_share * self.context)


# One sequence in Hugging Face Transformers, whose dense step is several times a minimal one.
CHELSEA_TABLE_3 = tuple(
    PublishedSpeedup("chelsea", context, 0.2, ratio, "Chelsea, Table 3, batch 1 in Transformers")
    for context, ratio in ((16384, 1.23), (32768, 1.97), (65536, 3.19))
)


@dataclass(frozen=True)
class Speedups:
    """Ratios of throughputs of one case: to the minimal dense loop, to Carrel's dense attention, and what the weights
    alone would reach of the former; None where the other was not measured."""

    to_minimal: float | None
    to_full: float | None
    weights_only: float | None = None


def decode_verdicts(case: DecodeCase, speedups: Speedups) -> Iterator[str]:
    """The verdicts on a case that there are targets for."""
    ratio = speedups.to_minimal
    for target in DECODE_TARGETS:
        if ratio is not None and target.is_of(case):
            hope = ", hoped for: reached" if ratio >= target.hoped else ""
            yield (
                f"{case}: {ratio:.2f} times the throughput of the minimal dense loop "
                f"(target: at least {target.least:.2f}): {_met(ratio >= target.least)}{hope}"
            )
    measured = [
        (found, whose)
        for found, whose in ((speedups.to_full, "carrel full"), (ratio, "the minimal dense loop"))
        if found is not None
    ]
    for published in CHELSEA_TABLE_3:
        if measured and published.is_of(case):
            told = ", ".join(f"{found:.2f} times {whose}" for found, whose in measured)
            most = speedups.weights_only
            bound = "" if most is None else f"; the weights alone allow {most:.2f} of the latter"
            is_met = all(found >= published.ratio for found, _ in measured)
            yield (
                f"{case}: {told} (to beat: {published.ratio:.2f}, {published.where}{bound}): {_met(is_met)}"
            )


def second_token_verdict(case: PrefillCase, ratio: float) -> str:
    """ratio: of the time to the second token to that under dense attention."""
    return (
        f"{case}: {ratio:.2f} of the time to the second token of carrel full "
        f"(target: at most {TT2T:.2f}): {_met(ratio <= TT2T)}"
    )


def own_share_verdicts(case: PrefillCase, share: float) -> Iterator[str]:
    """share: of the policy time in the time to the first token."""
    most = MOST_OWN_SHARE.get(case.policy)
    if most is not None and case.shape == SHAPE and case.context >= LEAST_LONG:
        yield (
            f"{case}: {100 * share:.1f} % of the time to the first token is policy time "
            f"(target: at most {100 * most:.0f} %): {_met(share <= most)}"
        )


def protokv_verdicts(shape: str, context: int, own_ms: Mapping[str, float]) -> Iterator[str]:
    """own_ms: policy time of one prompt of this length, by policy."""
    ours = own_ms.get("protokv")
    if ours is None or shape != SHAPE or context < LEAST_LONG:
        return
    if snapkv := own_ms.get("snapkv"):
        yield f"{context} protokv: {ours / snapkv:.2f} times the policy time of snapkv (close to 1 is wanted)"
    if (clusterkv := own_ms.get("clusterkv")) is not None:
        ratio = clusterkv / ours
        yield (
            f"{context} protokv: the clustering of clusterkv takes {ratio:.2f} times its policy time "
            f"(target: at least {CLUSTERKV_TO_PROTOKV:.1f}): {_met(ratio >= CLUSTERKV_TO_PROTOKV)}"
        )


def _met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"
