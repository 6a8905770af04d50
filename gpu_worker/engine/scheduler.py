"""Decides which requests wait, prefill and decode, and which prompt is next."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable

from gpu_worker.engine.prompt_room import PromptRoom
from gpu_worker.engine.request import Request, Status

STRETCH = 4.0


class Scheduler:
    """Every decoding request takes part in every step. Prompts share the rest, some of them in progress at once.

    The least `priority` comes first. Within it the next quantum goes to the caller with the least device time so far.
    Of that caller's prompts it goes to the one with the earliest deadline. A deadline is the arrival plus a multiple of
    the time that the prompt takes alone. So short prompts overtake long ones, but not for ever, as a later one has a
    later deadline. Many prompts of one caller delay no other caller. Nor do many callers with short prompts: each of
    them begins no further behind an even share than its first prompt may be stretched.
    """

    def __init__(
        self,
        max_num_seqs: int,
        room: PromptRoom,
        estimate: Callable[[Request], float],
        stretch: float = STRETCH,
    ) -> None:
        """room: the memory for prompts in progress.
        estimate: the seconds that a prompt takes alone.
        stretch: how many times that it may take while shorter ones overtake it.
        """
        self._room = room
        self._estimate = estimate
        self._stretch = stretch
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free_seats = deque(range(max_num_seqs))
        self._by_id: dict[str, Request] = {}
        # Seconds of prefill that each caller has had, by its weight, as far as they are compared.
        self._served: dict[bytes, float] = defaultdict(float)
        # What each would have had, by priority, if those with prompts had shared the device evenly.
        self._even: dict[int, float] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the waiting prompts."""
        return sum(request.num_prefill for request in self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def last_running(self) -> Request:
        """The running request that is preempted first: the youngest of the lowest priority."""
        return max(self._running, key=lambda request: request.rank)

    @property
    def num_free_seats(self) -> int:
        return len(self._free_seats)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """A waiting request."""
        self._enter(request)
        self._by_id[request.request_id] = request
        self._waiting.append(request)

    def _enter(self, request: Request) -> None:
        """Before it is one of the prompts. A caller without prompts is owed nothing for that time."""
        caller, priority, prompts = request.caller, request.priority, self._prompts()
        priorities = {other.priority for other in prompts}
        self._even = {each: even for each, even in self._even.items() if each in priorities}
        if all(other.caller != caller for other in prompts):
            least = min((self._served[other.caller] for other in prompts), default=0.0)
            even = self._even.get(priority, 0.0) - self._stretch * self._estimate(request)
            self._served[caller] = max(self._served[caller], least, even)
        self._even.setdefault(priority, self._served[caller])

    def find(self, request_id: str) -> Request | None:
        return self._by_id.get(request_id)

    def found(self, names: Iterable[str]) -> list[Request]:
        """Return the requests of these names that are not over."""
        return [self._by_id[name] for name in names if name in self._by_id]

    def next_prompt(
        self, may_admit: bool, may_offload: bool = True, held: Collection[Request] = ()
    ) -> Request | None:
        """The request with the next prompt. A waiting one is returned only if it may be admitted and there is memory
        for it. It also needs a seat, or a request of lower priority to preempt.

        may_offload: also requests that were refused by a full arena.
        held: requests to leave out; the prompts among them are computed, or wait for a silent store.
        """
        prompts = self.with_status(Status.PREFILL)
        if may_admit:
            prompts += self._next_waiting(prompts, may_offload, held)
        return min((each for each in prompts if each not in held), key=self._urgency, default=None)

    def _next_waiting(
        self, prefilling: list[Request], may_offload: bool, held: Collection[Request]
    ) -> list[Request]:
        """The most urgent short prompt and the most urgent long one, if there is memory for them next to those in
        progress. Later prompts may not take memory that frees up before them."""
        waiting = [each for each in self._waiting if may_offload or not self._waits_aside(each)]
        waiting = [each for each in waiting if each not in held]
        is_lent = all(self._room.is_short(each.num_prefill) for each in waiting)
        computed = [each for each in prefilling if is_lent and each in held]
        left = [each for each in prefilling if each not in computed]
        found = [self._first(waiting, is_short, left, computed) for is_short in (True, False)]
        return [request for request in found if request is not None]

    def _first(
        self,
        waiting: Iterable[Request],
        is_short: bool,
        prefilling: list[Request],
        computed: Iterable[Request] = (),
    ) -> Request | None:
        """computed: prompts of which nothing is left to compute, see `PromptRoom.fits`."""
        alike = [each for each in waiting if self._room.is_short(each.num_prefill) is is_short]
        first = min(alike, key=self._urgency, default=None)
        lengths = ([each.num_prefill for each in some] for some in (prefilling, computed))
        if first is None or not self._room.fits(first.num_prefill, *lengths):
            return None
        return first if self._free_seats or self.lower(first) else None

    def next_beside(self, together: list[Request], held: Collection[Request]) -> Request | None:
        """The most urgent short prompt that waits, if it may be admitted without another's seat. It fits a chunk
        together with these, which were admitted just now. held: are left out."""
        if not self._free_seats:
            return None
        waiting = [each for each in self._waiting if each not in held and not self._waits_aside(each)]
        found = self._first(waiting, True, self.with_status(Status.PREFILL))
        num_tokens = sum(request.num_prefill - request.num_cached for request in together)
        return found if found is not None and self._room.is_short(num_tokens + found.num_prefill) else None

    def _prompts(self) -> list[Request]:
        return [*self.with_status(Status.PREFILL), *self._waiting]

    def _urgency(self, request: Request) -> tuple[int, float, float]:
        deadline = request.clock.submitted + self._stretch * self._estimate(request)
        return request.priority, self._served[request.caller], deadline

    def _waits_aside(self, request: Request) -> bool:
        """Tell whether it waits for something that other requests may not need, so these may overtake it."""
        return request.waits_for_arena

    def seat(self, request: Request) -> None:
        """Give a waiting request a free seat: the one that was left first, so that the device is done with it."""
        request.seat = self._free_seats.popleft()

    def fits_without(self, request: Request, leaving: Collection[Request]) -> bool:
        """Return whether a waiting request would get a seat, and memory for its prompt, if these running ones left."""
        prompts = [each.num_prefill for each in self.with_status(Status.PREFILL) if each not in leaving]
        return bool(self._free_seats or leaving) and self._room.fits(request.num_prefill, prompts)

    def unseat(self, request: Request) -> None:
        """Take the seat back: the request waits on."""
        self._free_seats.append(request.seat)
        request.seat = -1

    def admit(self, request: Request) -> None:
        """Move a seated request to the running ones."""
        self._waiting.remove(request)
        self._running.append(request)
        request.status = Status.PREFILL

    def serve(self, request: Request, seconds: float) -> None:
        """Its prompt has so much of the device."""
        self._served[request.caller] += seconds / request.asked.weight
        weights = {each.caller: each.asked.weight for each in (request, *self._prompts())}
        priority, share = request.priority, seconds / sum(weights.values())
        self._even[priority] = self._even.get(priority, 0.0) + share

    def wait_again(self, request: Request) -> None:
        """Move a running request back to the waiting ones, to its place by arrival, and free its seat."""
        if request.status is not Status.PREFILL:
            self._enter(request)
        self._running.remove(request)
        self.unseat(request)
        request.status = Status.WAITING
        waiting = [*self._waiting, request]
        self._waiting = deque(sorted(waiting, key=lambda each: each.clock.submitted))

    def lower(self, request: Request) -> list[Request]:
        """The running requests of lower priority than this one, in the order of preemption."""
        priority = request.priority
        lower = [other for other in self._running if other.priority > priority]
        return sorted(lower, key=lambda other: other.rank, reverse=True)

    def with_status(self, status: Status) -> list[Request]:
        return [request for request in self._running if request.status is status]

    def all(self) -> list[Request]:
        return [*self._waiting, *self._running]

    def remove(self, request: Request) -> None:
        """Forget a request wherever it is, and free its seat."""
        self._by_id.pop(request.request_id, None)
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        if request.seat >= 0:
            self.unseat(request)
        request.status = Status.FINISHED
        if not any(other.caller == request.caller for other in self._by_id.values()):
            self._served.pop(request.caller, None)
