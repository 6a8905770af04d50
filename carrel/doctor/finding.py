"""One line of the doctor's report, and the facts that checks judge by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from carrel.process.settings import Resolved
from carrel.serve.options import ServeOptions
from kv_store.config import default_arena_bytes

GIB = 2**30


class State(StrEnum):
    """WARNING: a start works, with less than it could have. PROBLEM: a start fails."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """subject: what was checked. text: what was found. remedy: empty where nothing is to be done."""

    state: State
    subject: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Start:
    """The start that is checked: the options as `carrel serve` would read them, and its user's folder."""

    resolved: Resolved[ServeOptions]
    home: Path

    @property
    def options(self) -> ServeOptions:
        return self.resolved.options

    @property
    def arena_bytes(self) -> int:
        """Return the arena's size, as given or as the store would choose it."""
        return self.options.arena_bytes or default_arena_bytes(self.options.slab_bytes)


def worst(findings: Iterable[Finding]) -> State:
    order = list(State)
    return max((each.state for each in findings), key=order.index, default=State.OK)
