"""A decode step on its way, and how an answer ends with one of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_worker.device import Mark
from gpu_worker.engine.steps.drawing import Drawn
from gpu_worker.errors import ArenaFull
from gpu_worker.records import FinishReason
from gpu_worker.state.sequence import Sequence


class End(NamedTuple):
    """Of an answer; stop_token_id: with which it ends, if it does with one."""

    sequence: Sequence
    reason: FinishReason
    stop_token_id: int | None


@dataclass(slots=True, eq=False)
class Decoding:
    """A decode step of some sequences between two marks. has_run: whether anybody took part. short: those for which the
    arena had no room; crowded: those for which there were no slots. drawn: its tokens on their way; None: there are
    none, or they were taken. is_over: its end was waited for."""

    begun: Mark
    ended: Mark
    sequences: list[Sequence] = field(default_factory=list)
    has_run: bool = True
    short: list[tuple[Sequence, ArenaFull]] = field(default_factory=list)
    crowded: list[Sequence] = field(default_factory=list)
    drawn: Drawn | None = None
    is_over: bool = False
