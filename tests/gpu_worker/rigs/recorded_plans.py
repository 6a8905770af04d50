"""Plans as the engine gave them, and their replay on another runner: how a step is debugged."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_worker.records.plans import Outcome, Runner
from gpu_worker.runner.runner import LocalRunner

VERBS = tuple(name for name in vars(Runner) if not name.startswith("_") and callable(getattr(Runner, name)))


@dataclass(frozen=True)
class Recorded:
    """A verb that was executed, with its plan and what came of it."""

    verb: str
    plan: tuple[Any, ...]
    outcome: Any


def record(runner: LocalRunner) -> list[Recorded]:
    """Note every plan that this runner executes from now on."""
    found: list[Recorded] = []

    def noting(verb: str, execute: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*plan: Any, **named: Any) -> Any:
            outcome = execute(*plan, **named)
            found.append(Recorded(verb, (*plan, *named.values()), outcome))
            return outcome

        return noted

    for verb in VERBS:
        setattr(runner, verb, noting(verb, getattr(runner, verb)))
    return found


def replay(plans: list[Recorded], runner: LocalRunner) -> list[Recorded]:
    """Execute the same plans on a runner that has done nothing yet."""
    return [Recorded(each.verb, each.plan, getattr(runner, each.verb)(*each.plan)) for each in plans]


def tokens_of(plans: list[Recorded]) -> dict[str, list[int]]:
    """The tokens of each request, in their order."""
    tokens: dict[str, list[int]] = {}
    for each in plans:
        for token in each.outcome.tokens if isinstance(each.outcome, Outcome) else ():
            tokens.setdefault(token.request_id, []).append(token.event.token_id)
    return tokens


def is_plain(value: Any) -> bool:
    """Return whether a value could cross a pipe: records, numbers, texts, errors, arrays, and lists of them."""
    if dataclasses.is_dataclass(value):
        return all(is_plain(getattr(value, each.name)) for each in dataclasses.fields(value))
    if isinstance(value, dict):
        return all(is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | bytes | int | float | enum.Enum | Exception | np.ndarray)
