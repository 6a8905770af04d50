"""Plans of the engine, and outcomes of the runner that executes them.

Every record is plain data that could cross a pipe: requests are named by their ids, decode steps and passes of prompts
by numbers, and nothing assumes that one rank executes a plan. `Runner` lists the verbs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from carrel.process.histogram import NOTHING, Distribution
from gpu_worker.errors import ArenaFull, WorkerError
from gpu_worker.records.events import Event, FinishReason, TokenEvent, Usage
from gpu_worker.records.requests import GenerationRequest


class WorkKind(enum.Enum):
    """Kinds of prefill, each with operations that take about equally long.

    SHORT: prompts that fit a chunk, where launching kernels takes its part.
    LONG: other prompts.
    SCORED: with the log probabilities of the prompt's tokens, which take much more time than their operations suggest.
    """

    SHORT = enum.auto()
    LONG = enum.auto()
    SCORED = enum.auto()


@dataclass(frozen=True, slots=True)
class Entered:
    """A request as the runner will execute it, in tokens.

    num_prefill: of its prompt. capacity: the most it may ever hold. is_open_ended: its answer may fill the context.
    num_expected: a guess at how much of the prompt is known. first_name: of the prompt's first slab, if it has one;
    may_reuse: whether it may share that with other requests. is_dense: its prompt is attended densely.
    """

    num_prefill: int
    capacity: int
    is_open_ended: bool
    num_expected: int = 0
    first_name: bytes | None = None
    may_reuse: bool = False
    is_dense: bool = True


@dataclass(frozen=True, slots=True)
class Admit:
    """Give a waiting request everything it needs to run, or nothing.

    policy: replaces the request's `auto`.
    may_open: whether it may take arena memory now.
    trusts_prefixes: whether it may read known prefixes.
    """

    request_id: str
    seat: int
    policy: str | None = None
    may_open: bool = True
    trusts_prefixes: bool = True


@dataclass(frozen=True, slots=True)
class Admitted:
    """The result of `Admit`; a request that was not admitted holds nothing.

    needs_arena: its rows go to the arena.
    missing_bytes: of the arena, where that was full.
    error: why it cannot be admitted now (StoreSilent, PrefixLoading) or at all.
    num_cached: tokens of its prompt that are known.
    lost: other requests with rows in an earlier store.
    """

    is_admitted: bool
    needs_arena: bool = False
    num_cached: int = 0
    missing_bytes: float = 0.0
    error: WorkerError | None = None
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pass:
    """The state of prompts that are computed together.

    shares: of each request in the pass. work, kind: floating-point operations of its next quantum. is_computed: every
    layer is computed. is_copying: and some are not in the arena yet.
    """

    number: int
    shares: dict[str, float]
    work: float
    kind: WorkKind
    is_computed: bool
    is_copying: bool


@dataclass(frozen=True, slots=True)
class RunQuantum:
    """Run the next quantum of a pass. waits: for a copy, where nothing is left to compute. is_timed: it counts as work
    of the current iteration."""

    number: int
    waits: bool = True
    is_timed: bool = False


@dataclass(frozen=True, slots=True)
class BeginStep:
    """Queue a decode step of these requests. after: the number of the step before, if its tokens are not known yet."""

    request_ids: tuple[str, ...]
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token. is_stop: it ends the answer and is not part of it. reason: why nothing may follow it."""

    request_id: str
    event: TokenEvent
    is_stop: bool = False
    reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    request_id: str
    error: WorkerError


@dataclass(slots=True)
class Outcome:
    """The result of a plan that works for several requests, by their ids.

    tokens: in their order.
    events: to be emitted.
    failed: with their errors.
    served, silent: requests that need the store; it has answered the served ones, the silent ones wait for its answer.
    short: the arena has no memory for them.
    crowded: there are no free slots for them.
    indexing: their indexes are being trained.
    prefilled: their indexes are being trained, and their prompts are done.
    ready: they may decode.
    passes: passes that changed.
    lost: their rows were in an earlier store.
    step: the number of a step that was queued.
    sampled: the requests that get a token from it.
    has_run: whether any request took part.
    """

    tokens: list[Token] = field(default_factory=list)
    events: list[tuple[str, Event]] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    short: list[tuple[str, ArenaFull]] = field(default_factory=list)
    crowded: list[str] = field(default_factory=list)
    indexing: list[str] = field(default_factory=list)
    prefilled: list[str] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    step: int | None = None
    sampled: list[str] = field(default_factory=list)
    has_run: bool = True


class Then(enum.Enum):
    """The state of a request after its release.

    END: it is over.
    PREEMPT: it waits, and keeps its tokens.
    RECOMPUTE: it waits, and its prompt is computed again.
    DISTRUST: as RECOMPUTE, without known prefixes.
    """

    END = enum.auto()
    PREEMPT = enum.auto()
    RECOMPUTE = enum.auto()
    DISTRUST = enum.auto()


@dataclass(frozen=True, slots=True)
class Release:
    """Free everything that a request holds."""

    request_id: str
    then: Then = Then.END


@dataclass(frozen=True, slots=True)
class Released:
    """The result of `Release`.

    usage: of the request so far, without its times.
    had_arena: whether it held arena memory.
    is_freeing: part of that becomes free later.
    num_prefill, trusts_prefixes: as it waits on.
    passes: passes that changed.
    """

    usage: Usage
    had_arena: bool = False
    is_freeing: bool = False
    num_prefill: int = 0
    trusts_prefixes: bool = True
    passes: tuple[Pass, ...] = ()


@dataclass(frozen=True, slots=True)
class Leaving:
    """A waiting request, and the running ones that may leave so that it fits. missing_bytes: that it missed in the
    arena."""

    request_id: str
    leaving: tuple[str, ...]
    missing_bytes: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of prefill work on the device."""

    work: float
    kind: WorkKind
    seconds: float


@dataclass(frozen=True, slots=True)
class RunnerStats:
    """The runner's part of `EngineStats`, by the same names."""

    prefilling: int = 0
    prefilling_tokens: int = 0
    prefilling_tokens_left: int = 0
    prompt_tokens_total: int = 0
    slot_used_tokens: float = 0.0
    offloaded_bytes_total: int = 0
    fetched_bytes_total: int = 0
    selected_rows_total: int = 0
    hit_rows_total: int = 0
    corrupt_segments_total: int = 0
    store_reachable: bool = True
    index_search_seconds: Distribution = NOTHING
    gather_seconds: Distribution = NOTHING
    h2d_copy_seconds: Distribution = NOTHING
    offload_seconds: Distribution = NOTHING
    decode_stall_seconds: dict[str, Distribution] = field(default_factory=dict)
    fallbacks_total: dict[str, int] = field(default_factory=dict)
    selected_tokens_ratio: Distribution = NOTHING


class Runner(Protocol):
    """Executes plans, one after the other. It decides nothing that a request could notice."""

    @property
    def num_free_slots(self) -> int:
        """Free slots of each layer and KV head, if all were shared evenly."""

    @property
    def silent_seconds(self) -> float:
        """How long the store has been silent; 0 while it answers, or is gone."""

    @property
    def is_store_reachable(self) -> bool:
        """Return whether the store answered when last asked; any thread may ask."""

    def enter(self, request: GenerationRequest) -> Entered:
        """Take in a request, which waits. Raises RequestError."""

    def admit(self, plan: Admit) -> Admitted: ...

    def begin_prompts(self, request_ids: tuple[str, ...]) -> Outcome:
        """Begin to compute the prompts of requests that were admitted together."""

    def run_quantum(self, plan: RunQuantum) -> Outcome: ...

    def finish_prompts(self, waits: bool) -> Outcome:
        """Take the first tokens of prompts that are done. waits: for tokens on their way."""

    def keep_prompts(self) -> None:
        """Let others find the prompts that `finish_prompts` finished: this may take the host some milliseconds."""

    def load_indexes(self, waits: bool) -> Outcome:
        """Load trained indexes. waits: a little, for one that is not ready."""

    def retry_indexes(self, request_ids: tuple[str, ...]) -> None:
        """Have the indexes trained again that failed for want of arena memory."""

    def begin_step(self, plan: BeginStep) -> Outcome: ...

    def is_reached(self, step: int) -> bool:
        """Return whether the device is past a step, without waiting."""

    def take_tokens(self, step: int) -> Outcome:
        """Wait for a step's tokens, if they were not taken yet."""

    def end_step(self, step: int) -> float:
        """Wait for a step's end; returns its seconds on the device."""

    def settle(self) -> list[Measured]:
        """End an iteration's timed quanta; wait until the device is at most one iteration behind. Returns what was
        measured meanwhile."""

    def release(self, plan: Release) -> Released: ...

    def finds_room(self, plan: Leaving) -> bool: ...

    def without_slots(self, request_ids: tuple[str, ...]) -> list[str]:
        """The requests without slots for their next tokens, after others gave up what they can do without."""

    def spread_slots(self) -> None:
        """Give running requests slots that no request waits for."""

    def holders(self) -> list[str]:
        """The requests that hold arena memory."""

    def is_freeing(self) -> bool:
        """Return whether memory in the arena becomes free without a preemption."""

    def leave_arena(self, request_id: str) -> bool:
        """Let a decoding request continue without its rows in the arena; False where it needs them."""

    def drop_copies(self) -> bool:
        """Free the arena's copies of prompts in progress; False where there are none."""

    def readers(self, missing_bytes: int) -> list[str]:
        """The prompts in progress that read known prefixes but need no arena; none if these are fewer bytes."""

    def renew_store(self) -> tuple[str, ...]:
        """Check the store, and attach to it again if need be; returns the requests that lost their rows."""

    def stats(self) -> RunnerStats: ...

    def reset_counts(self) -> None: ...

    def close(self) -> None:
        """Detach from the store."""
