"""A decode step on its way."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_worker.device import Mark
from gpu_worker.errors import ArenaFull
from gpu_worker.state.sequence import Sequence


@dataclass(slots=True)
class Decoding:
    """A decode step of some sequences between two marks. has_run: whether anybody took part. short: those for which the
    arena had no room; crowded: those for which there were no slots. is_over: its tokens were taken."""

    begun: Mark
    ended: Mark
    sequences: list[Sequence] = field(default_factory=list)
    has_run: bool = True
    short: list[tuple[Sequence, ArenaFull]] = field(default_factory=list)
    crowded: list[Sequence] = field(default_factory=list)
    is_over: bool = False
