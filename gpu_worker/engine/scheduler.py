"""Which sequences wait, prefill and decode, and whose prompt is next. Counts and times only: no tensors, no model."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable

from gpu_worker.runner.prompts.prompt_memory import PromptRoom
from gpu_worker.state.sequence import Sequence, Status

STRETCH = 4.0


class Scheduler:
    """Every decoding sequence takes part in every step. Prompts share the rest, some of them in progress at once.

    The least `priority` comes first. Within it the next quantum goes to the caller whose prompts have had least of the
    device, and of that caller's prompts to the one with the earliest deadline: its arrival, and a multiple of the time
    that it takes alone. So short prompts overtake long ones, but not for ever, as a later one has a later deadline; and
    many prompts of one caller hold up nobody else. Nor do many callers, however short their prompts are: each of them
    begins no further behind an even share than its first prompt may be stretched.
    """

    def __init__(
        self,
        max_num_seqs: int,
        room: PromptRoom,
        estimate: Callable[[Sequence], float],
        stretch: float = STRETCH,
    ) -> None:
        """room: for prompts in progress. estimate: the seconds that a prompt takes alone. stretch: how many times
        that it may take while shorter ones overtake it."""
        self._room = room
        self._estimate = estimate
        self._stretch = stretch
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._free_seats = list(range(max_num_seqs - 1, -1, -1))
        self._by_id: dict[str, Sequence] = {}
        # Seconds of prefill that each caller has had, by its weight, as far as they are compared.
        self._served: dict[bytes, float] = defaultdict(float)
        # What each would have had, by priority, if those with prompts had shared the device evenly.
        self._even: dict[int, float] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Of the prompts that wait."""
        return sum(sequence.num_prefill for sequence in self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def last_running(self) -> Sequence:
        """Who gives way first of those that run: of the lowest priority the youngest."""
        return max(self._running, key=lambda sequence: sequence.rank)

    @property
    def num_free_seats(self) -> int:
        return len(self._free_seats)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        """A waiting sequence."""
        self._enter(sequence)
        self._by_id[sequence.sequence_id] = sequence
        self._waiting.append(sequence)

    def _enter(self, sequence: Sequence) -> None:
        """Before it is one of the prompts. A caller without prompts is owed nothing for that time."""
        caller, priority, prompts = sequence.caller, sequence.request.priority, self._prompts()
        priorities = {other.request.priority for other in prompts}
        self._even = {each: even for each, even in self._even.items() if each in priorities}
        if all(other.caller != caller for other in prompts):
            least = min((self._served[other.caller] for other in prompts), default=0.0)
            even = self._even.get(priority, 0.0) - self._stretch * self._estimate(sequence)
            self._served[caller] = max(self._served[caller], least, even)
        self._even.setdefault(priority, self._served[caller])

    def find(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def next_prompt(
        self, may_admit: bool, may_offload: bool = True, held: Collection[Sequence] = ()
    ) -> Sequence | None:
        """The sequence whose prompt is next; a waiting one only if it may be admitted, and there are room for it and a
        seat, or one of lower priority that gives way. may_offload: also those that were refused by a full arena. held:
        are left out; of prompts among them nothing is left to compute, or the store is silent."""
        prompts = self.with_status(Status.PREFILL)
        if may_admit:
            prompts += self._next_waiting(prompts, may_offload, held)
        return min((each for each in prompts if each not in held), key=self._urgency, default=None)

    def _next_waiting(
        self, prefilling: list[Sequence], may_offload: bool, held: Collection[Sequence]
    ) -> list[Sequence]:
        """The most urgent short prompt and the most urgent long one, if there is room beside those in progress. Nobody
        overtakes them to the room that comes."""
        waiting = [each for each in self._waiting if may_offload or not each.offloads]
        waiting = [each for each in waiting if each not in held]
        is_lent = all(self._room.is_short(each.num_prefill) for each in waiting)
        computed = [each for each in prefilling if is_lent and each in held]
        left = [each for each in prefilling if each not in computed]
        found = [self._first(waiting, is_short, left, computed) for is_short in (True, False)]
        return [sequence for sequence in found if sequence is not None]

    def _first(
        self,
        waiting: Iterable[Sequence],
        is_short: bool,
        prefilling: list[Sequence],
        computed: Iterable[Sequence] = (),
    ) -> Sequence | None:
        """computed: prompts of which nothing is left to compute, see `PromptRoom.fits`."""
        alike = [each for each in waiting if self._room.is_short(each.num_prefill) is is_short]
        first = min(alike, key=self._urgency, default=None)
        lengths = ([each.num_prefill for each in some] for some in (prefilling, computed))
        if first is None or not self._room.fits(first.num_prefill, *lengths):
            return None
        return first if self._free_seats or self.lower(first) else None

    def next_beside(self, together: list[Sequence], held: Collection[Sequence]) -> Sequence | None:
        """The most urgent short prompt that waits, if it may be admitted without another's seat, and a chunk has room
        for it beside these, which were admitted just now. held: are left out."""
        if not self._free_seats:
            return None
        waiting = [each for each in self._waiting if each not in held]
        found = self._first(waiting, True, self.with_status(Status.PREFILL))
        num_tokens = sum(sequence.num_prefill - sequence.num_cached for sequence in together)
        return found if found is not None and self._room.is_short(num_tokens + found.num_prefill) else None

    def _prompts(self) -> list[Sequence]:
        return [*self.with_status(Status.PREFILL), *self._waiting]

    def _urgency(self, sequence: Sequence) -> tuple[int, float, float]:
        deadline = sequence.clock.submitted + self._stretch * self._estimate(sequence)
        return sequence.request.priority, self._served[sequence.caller], deadline

    def seat(self, sequence: Sequence) -> None:
        """Give a waiting sequence a free seat."""
        sequence.seat = self._free_seats.pop()

    def fits_without(self, sequence: Sequence, leaving: Collection[Sequence]) -> bool:
        """Whether a waiting sequence would get a seat, and room for its prompt, if these running ones left."""
        prompts = [each.num_prefill for each in self.with_status(Status.PREFILL) if each not in leaving]
        return bool(self._free_seats or leaving) and self._room.fits(sequence.num_prefill, prompts)

    def unseat(self, sequence: Sequence) -> None:
        """Take the seat back: the sequence waits on."""
        self._free_seats.append(sequence.seat)
        sequence.seat = -1

    def admit(self, sequence: Sequence) -> None:
        """Move a seated sequence to the running ones."""
        self._waiting.remove(sequence)
        self._running.append(sequence)
        sequence.status = Status.PREFILL

    def serve(self, sequence: Sequence, seconds: float) -> None:
        """Its prompt has so much of the device."""
        self._served[sequence.caller] += seconds / sequence.request.weight
        weights = {each.caller: each.request.weight for each in (sequence, *self._prompts())}
        priority, share = sequence.request.priority, seconds / sum(weights.values())
        self._even[priority] = self._even.get(priority, 0.0) + share

    def wait_again(self, sequence: Sequence) -> None:
        """Move a running sequence back to the waiting ones, to its place by arrival, and free its seat."""
        if sequence.status is not Status.PREFILL:
            self._enter(sequence)
        self._running.remove(sequence)
        self.unseat(sequence)
        sequence.status = Status.WAITING
        waiting = [*self._waiting, sequence]
        self._waiting = deque(sorted(waiting, key=lambda each: each.clock.submitted))

    def lower(self, sequence: Sequence) -> list[Sequence]:
        """The running sequences of lower priority than this one; first who gives way first."""
        priority = sequence.request.priority
        lower = [other for other in self._running if other.request.priority > priority]
        return sorted(lower, key=lambda other: other.rank, reverse=True)

    def with_status(self, status: Status) -> list[Sequence]:
        return [sequence for sequence in self._running if sequence.status is status]

    def decoding(self) -> list[Sequence]:
        """Those of the next step. Nobody waits for one whose constraint is slow, but for such ones alone."""
        decoding = self.with_status(Status.DECODE)
        return [sequence for sequence in decoding if sequence.sampler.is_ready] or decoding

    def offloading(self) -> list[Sequence]:
        return [sequence for sequence in self._running if sequence.offloads]

    def all(self) -> list[Sequence]:
        return [*self._waiting, *self._running]

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is, and free its seat."""
        self._by_id.pop(sequence.sequence_id, None)
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence.seat >= 0:
            self.unseat(sequence)
        sequence.status = Status.FINISHED
        if not any(other.caller == sequence.caller for other in self._by_id.values()):
            self._served.pop(sequence.caller, None)
