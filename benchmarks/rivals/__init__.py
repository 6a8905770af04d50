"""The rivals by name. Each runs in a process of its own, so that its memory is its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

from benchmarks.figures import DecodeCase, DecodeFigures, PrefillCase, PrefillFigures

C = TypeVar("C")
F = TypeVar("F")


@dataclass(frozen=True)
class RivalSpec:
    """Where a rival of decode or prefill is made, from a ModelShape and a device, and which cases it gets.

    has_policies: one case for every policy and budget, else one of dense attention. max_batch: larger batches are left
    out. max_repeats: of steps or prompts, for a rival that is slow.
    """

    maker: str
    has_policies: bool = False
    max_batch: int | None = None
    max_repeats: int | None = None

    def load(self) -> Callable[..., Any]:
        module, _, maker = self.maker.partition(":")
        found: Callable[..., Any] = getattr(import_module(module), maker)
        return found


@dataclass(frozen=True)
class Contest(Generic[C, F]):
    """Rivals that are put to the same cases. `over` joins the figures of several rounds."""

    name: str
    rivals: Mapping[str, RivalSpec]
    case: type[C]
    figures: type[F]
    over: Callable[[Sequence[F]], F]


# what all ratios are to
BASELINE = "minimal dense"
_DECODE = {
    BASELINE: RivalSpec("benchmarks.rivals.minimal_dense:decode"),
    "weights only": RivalSpec("benchmarks.rivals.minimal_dense:decode_weights"),
    "carrel": RivalSpec("benchmarks.rivals.carrel_decode:decode", has_policies=True),
    "transformers": RivalSpec("benchmarks.rivals.transformers_decode:decode", max_batch=1, max_repeats=16),
    "transformers offloaded": RivalSpec(
        "benchmarks.rivals.transformers_decode:decode_offloaded", max_batch=1, max_repeats=4
    ),
}
_PREFILL = {
    BASELINE: RivalSpec("benchmarks.rivals.minimal_dense:prefill"),
    "carrel": RivalSpec("benchmarks.rivals.carrel_prefill:prefill", has_policies=True),
    "carrel index on gpu": RivalSpec(
        "benchmarks.rivals.carrel_prefill:prefill_training_on_gpu", has_policies=True
    ),
    "carrel index on cpu": RivalSpec(
        "benchmarks.rivals.carrel_prefill:prefill_training_in_store", has_policies=True
    ),
    "transformers": RivalSpec("benchmarks.rivals.transformers_decode:prefill"),
}
DECODE = Contest("decode", _DECODE, DecodeCase, DecodeFigures, DecodeFigures.over)
PREFILL = Contest("prefill", _PREFILL, PrefillCase, PrefillFigures, PrefillFigures.over)
CONTESTS: Mapping[str, Contest[Any, Any]] = {contest.name: contest for contest in (DECODE, PREFILL)}
