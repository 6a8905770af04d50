"""A request as the engine sees it: numbers and times. Its place on the device is the runner's (`Sequence`)."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field, replace

from gpu_worker.records import EventSink, GenerationRequest, Usage
from gpu_worker.records.plans import Entered

# Tokens for which a sequence has slots before they come, where it attends everything: more are taken that seldom.
AHEAD = 256


class Status(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    INDEXING = "indexing"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True)
class Clock:
    """Monotonic times of a request's life, in seconds; 0 where not reached."""

    submitted: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    prefilled: float = 0.0
    indexed: float = 0.0

    def times(self, usage: Usage) -> Usage:
        """Return the usage with the milliseconds of each stage until now."""
        now = time.monotonic()
        return replace(
            usage,
            queue_ms=1e3 * ((self.admitted or now) - self.submitted),
            prefill_ms=1e3 * ((self.prefilled or now) - self.admitted) if self.admitted else 0.0,
            index_wait_ms=1e3 * ((self.indexed or now) - self.prefilled) if self.prefilled else 0.0,
            decode_ms=1e3 * (now - self.indexed) if self.indexed else 0.0,
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A request in the engine.

    asked: as the service gave it. entered: as the runner will execute it. seat: its index on the device, -1 while it
    waits. num_prefill, num_cached: tokens of its prompt, and those that are known. num_output: tokens of its answer so
    far. waits_for_arena: it was refused because the arena was full. was_preempted: its policy stays.
    trusts_prefixes: False once a known prefix was lost or corrupt.
    """

    asked: GenerationRequest
    sink: EventSink
    entered: Entered
    num_prefill: int
    status: Status = Status.WAITING
    seat: int = -1
    num_cached: int = 0
    num_output: int = 0
    waits_for_arena: bool = False
    was_preempted: bool = False
    trusts_prefixes: bool = True
    clock: Clock = field(default_factory=Clock)

    @property
    def request_id(self) -> str:
        return self.asked.request_id

    @property
    def priority(self) -> int:
        return self.asked.priority

    @property
    def rank(self) -> tuple[int, float]:
        """Orders requests by priority, then by arrival: the greatest is preempted first."""
        return self.priority, self.clock.submitted

    @property
    def caller(self) -> bytes:
        """The caller, as far as callers are distinguished."""
        return self.asked.prefix_salt

    @property
    def runs(self) -> bool:
        return self.status not in (Status.WAITING, Status.FINISHED)

    @property
    def num_known(self) -> int:
        """Tokens of its prompt that need not be computed: a guess while it waits."""
        return self.entered.num_expected if self.status is Status.WAITING else self.num_cached

    @property
    def soon_tokens(self) -> int:
        """Tokens that it holds before it asks for more slots."""
        known = len(self.asked.prompt_token_ids) + self.num_output
        return min(self.entered.capacity, known + AHEAD)
