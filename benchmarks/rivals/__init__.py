"""The rivals by name. Each runs in a process of its own, so that its memory is its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any, Generic, TypeVar

from benchmarks.figures import DecodeCase, DecodeFigures, PrefillCase, PrefillFigures

C = TypeVar("C")
F = TypeVar("F")


@dataclass(frozen=True)
class RivalSpec:
    """A rival of decode or prefill, and the cases that it gets.

    made_by: its class, made of a ModelShape, a device and `options`. It holds a model with random weights from case to
    case and alone uses the device of its process. Its `measure(case)` returns figures, and frees all but the weights,
    also when it fails: with NotMeasurable for a case that it cannot do, or torch.OutOfMemoryError.
    has_policies: one case for every policy and budget, else one of dense attention. max_batch: larger batches are left
    out. max_repeats: of steps or prompts, for a rival that is slow.
    """

    made_by: str
    options: Mapping[str, Any] = field(default_factory=dict)
    has_policies: bool = False
    max_batch: int | None = None
    max_repeats: int | None = None

    def load(self) -> Callable[..., Any]:
        module, _, name = self.made_by.partition(":")
        return partial(getattr(import_module(f"benchmarks.rivals.{module}"), name), **self.options)


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
    BASELINE: RivalSpec("minimal_dense:MinimalDense"),
    "weights only": RivalSpec("minimal_dense:MinimalDense", {"has_attention": False}),
    "carrel": RivalSpec("carrel_decode:CarrelDecode", has_policies=True),
    "transformers": RivalSpec("transformers_decode:TransformersDecode", max_batch=1, max_repeats=16),
    "transformers offloaded": RivalSpec(
        "transformers_decode:TransformersDecode", {"is_offloaded": True}, max_batch=1, max_repeats=4
    ),
}
_CARREL = RivalSpec("carrel_prefill:CarrelPrefill", has_policies=True)
_PREFILL = {
    BASELINE: RivalSpec("minimal_dense:MinimalDensePrefill"),
    "carrel": _CARREL,
    "carrel index on gpu": replace(_CARREL, options={"index_device": "gpu"}),
    "carrel index on cpu": replace(_CARREL, options={"index_device": "cpu"}),
    "transformers": RivalSpec("transformers_decode:TransformersPrefill"),
}
DECODE = Contest("decode", _DECODE, DecodeCase, DecodeFigures, DecodeFigures.over)
PREFILL = Contest("prefill", _PREFILL, PrefillCase, PrefillFigures, PrefillFigures.over)
CONTESTS: Mapping[str, Contest[Any, Any]] = {contest.name: contest for contest in (DECODE, PREFILL)}
