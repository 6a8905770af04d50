"""Cases of many rivals, measured one rival after the other in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from benchmarks.children import answers_of
from benchmarks.errors import BenchmarkError
from benchmarks.figures import revive
from benchmarks.rivals import Contest
from carrel.progress import RunProgress

C = TypeVar("C")
F = TypeVar("F")


@dataclass(frozen=True)
class Outcome(Generic[C, F]):
    """One case of one rival: its figures, or why there are none."""

    rival: str
    case: C
    figures: F | None = None
    error: str | None = None


def choose(contest: Contest[C, F], names: Sequence[str]) -> list[str]:
    """Raises BenchmarkError for an unknown rival."""
    if unknown := [name for name in names if name not in contest.rivals]:
        raise BenchmarkError(f"no rival {', '.join(unknown)}; there are {', '.join(contest.rivals)}")
    return list(names)


def measure_rivals(
    contest: Contest[C, F],
    plan: Mapping[str, Sequence[C]],
    shape: str,
    device: str,
    rounds: int,
    progress: RunProgress,
    keep: Callable[[list[Outcome[C, F]]], object] = lambda outcomes: None,
) -> list[Outcome[C, F]]:
    """Every rival in `plan` with its cases; the order turns from round to round.

    A rival whose process fails has the reason in the cases that it did not answer; the others go on. keep: gets all
    outcomes so far after each, so that a run that is cut off has measured something.
    """
    found: dict[tuple[str, C], list[Outcome[C, F]]] = {}
    names = [name for name, cases in plan.items() if cases]
    for turn in range(rounds):
        start = turn % max(1, len(names))
        for name in (*names[start:], *names[:start]):
            progress.doing(name)
            for outcome in _outcomes(contest, name, plan[name], shape, device):
                found.setdefault((name, outcome.case), []).append(outcome)
                shown = outcome.error or outcome.figures
                progress.done(f"round {turn + 1}/{rounds}, {name}, {outcome.case}: {shown}")
                keep(_so_far(contest, plan, found))
    return _so_far(contest, plan, found)


def _so_far(
    contest: Contest[C, F],
    plan: Mapping[str, Sequence[C]],
    found: Mapping[tuple[str, C], Sequence[Outcome[C, F]]],
) -> list[Outcome[C, F]]:
    """In the plan's order."""
    known = [(name, case) for name, cases in plan.items() for case in cases if (name, case) in found]
    return [_over(contest, found[key]) for key in known]


def _outcomes(
    contest: Contest[C, F], name: str, cases: Sequence[C], shape: str, device: str
) -> Iterator[Outcome[C, F]]:
    left = list(cases)
    task: dict[str, Any] = {"shape": shape, "device": device, "cases": [_fields(case) for case in cases]}
    try:
        for answer in answers_of("benchmarks.rivals.child", [contest.name, name], task):
            case = left.pop(0)
            if "figures" in answer:
                yield Outcome(name, case, revive(contest.figures, answer["figures"]))
            else:
                yield Outcome(name, case, error=answer["error"])
    except BenchmarkError as exc:
        yield from (Outcome(name, case, error=str(exc)) for case in left)


def _over(contest: Contest[C, F], rounds: Sequence[Outcome[C, F]]) -> Outcome[C, F]:
    figures = [one.figures for one in rounds if one.figures is not None]
    errors = [one.error for one in rounds if one.error is not None]
    first = rounds[0]
    return Outcome(
        first.rival, first.case, contest.over(figures) if figures else None, next(iter(errors), None)
    )


def _fields(case: Any) -> dict[str, Any]:
    return asdict(case)
