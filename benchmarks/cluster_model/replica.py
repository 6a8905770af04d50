"""One GPU with its worker and store, as a flow: between two changes every request advances at a constant rate."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.cluster_model.arena import Arena
from benchmarks.cluster_model.measured import Measured
from benchmarks.cluster_model.parameters import ClusterParameters
from benchmarks.cluster_model.traffic import Request

INFINITE = float("inf")
# seconds and tokens below which two events are one
CLOSE = 1e-9

PREFILL, SEATS, GPU_MEMORY, HOST_MEMORY = "prefill", "seats", "GPU memory", "host memory"


@dataclass(slots=True)
class Totals:
    """Integrals over time since they were last taken. waiting_s: of all requests that waited here, by what they
    waited for."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    seat_s: float = 0.0
    slot_s: float = 0.0
    leased_s: float = 0.0
    used_s: float = 0.0
    output_tokens: float = 0.0
    computed_tokens: int = 0
    known_tokens: int = 0
    first_tokens: int = 0
    waiting_s: dict[str, float] = field(default_factory=dict)


class Replica:
    """First come, first served; one prompt at a time, and a decode step after each of its quanta.

    As in the engine, a quantum is one chunk of one layer, so that a prompt of n chunks takes at least as many steps as
    it has chunks and layers while others decode.
    """

    def __init__(
        self, measured: Measured, parameters: ClusterParameters, dropped: Callable[[int], None]
    ) -> None:
        self._measured, self._parameters = measured, parameters
        capacity = int(parameters.host_bytes * parameters.arena_share) // measured.token_bytes
        self.arena = Arena(capacity, dropped)
        self._totals = Totals()
        self._now = 0.0
        self._waiting: deque[Request] = deque()
        self._prefilling: Request | None = None
        self._left_s = 0.0
        self._quantum_s = 0.0
        # (tokens that every sequence has made since the start when this one is done, number, request)
        self._decoding: list[tuple[float, int, Request]] = []
        self._made = 0.0
        self._context = 0.0
        self._slots = 0
        self._decode_rate = 0.0
        self._prefill_rate = 0.0
        self._cause = ""

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._decoding) + (self._prefilling is not None)

    def advance(self, now: float) -> None:
        """Let time pass; no request may become due before `now`."""
        passed = now - self._now
        self._now = now
        if passed <= 0:
            return
        totals, num_decoding = self._totals, len(self._decoding)
        self._made += passed * self._decode_rate
        totals.output_tokens += passed * self._decode_rate * num_decoding
        totals.decode_s += passed * (num_decoding > 0)
        if self._prefilling is not None:
            self._left_s -= passed * self._prefill_rate
            totals.prefill_s += passed
        totals.seat_s += passed * (num_decoding + (self._prefilling is not None))
        totals.slot_s += passed * self._slots
        totals.leased_s += passed * self.arena.leased
        totals.used_s += passed * self.arena.used
        if self._waiting:
            totals.waiting_s[self._cause] = totals.waiting_s.get(self._cause, 0.0) + passed * len(
                self._waiting
            )

    def restart(self, now: float) -> Totals:
        """Let time pass, return what was counted, and reset the counters."""
        self.advance(now)
        counted, self._totals = self._totals, Totals()
        return counted

    def enqueue(self, request: Request) -> None:
        """After `advance` to now."""
        request.ready = self._now
        self._waiting.append(request)
        self._settle()

    def next_change(self) -> float:
        """When the next request is due."""
        first = self._now + self._left_s / self._prefill_rate if self._prefilling is not None else INFINITE
        if self._decoding:
            first = min(first, self._now + (self._decoding[0][0] - self._made) / self._decode_rate)
        return first

    def change(self) -> list[Request]:
        """The requests that finished by now; after `advance` to when a change is due."""
        finished = []
        while self._decoding and self._decoding[0][0] - self._made <= CLOSE * max(1.0, self._made):
            finished.append(self._leave(heapq.heappop(self._decoding)[2]))
        begun = self._prefilling
        if begun is not None and self._left_s <= CLOSE * max(1.0, self._now):
            self._prefilling = None
            begun.first_token = self._now
            self._totals.first_tokens += 1
            self._totals.output_tokens += 1
            self._context += begun.mean_context
            target = self._made + begun.kind.output_tokens - 1
            heapq.heappush(self._decoding, (target, begun.number, begun))
        self._settle()
        return finished

    def _leave(self, request: Request) -> Request:
        request.finished = self._now
        self._context -= request.mean_context
        self._slots -= request.num_tokens
        self.arena.release(request.num_tokens - request.prefix_tokens, request.prefix)
        return request

    def _settle(self) -> None:
        """Admit the requests that fit, and set the rates until the next change."""
        if self._prefilling is None and self._waiting:
            self._cause = self._admit(self._waiting[0])
        elif self._waiting:
            self._cause = PREFILL
        step_s = 0.0
        if self._decoding:
            step_s = self._measured.step.ms(len(self._decoding), self._context) / 1000
        cycle_s = step_s + (self._quantum_s if self._prefilling is not None else 0.0)
        self._decode_rate = 1 / cycle_s if self._decoding else 0.0
        self._prefill_rate = self._quantum_s / cycle_s if self._prefilling is not None else 0.0

    def _admit(self, request: Request) -> str:
        """Begin its prompt, or say what it waits for."""
        if len(self._decoding) >= self._parameters.max_num_seqs:
            return SEATS
        if self._slots + request.num_tokens > self._measured.slot_tokens:
            return GPU_MEMORY
        request.has_prefix = self.arena.holds(request.prefix)
        own = request.num_tokens - request.prefix_tokens
        if not self.arena.take(own, request.prefix, request.prefix_tokens):
            return HOST_MEMORY
        self._waiting.popleft()
        self._slots += request.num_tokens
        request.admitted = self._now
        known, measured = request.known_tokens, self._measured
        computed = request.kind.prompt_tokens - known
        compute_s = measured.prefill.seconds(request.kind.prompt_tokens, known)
        self._left_s = compute_s + known * measured.token_bytes / measured.from_host_bytes_per_s
        num_chunks = -(-computed // self._parameters.prefill_chunk)
        self._quantum_s = self._left_s / (num_chunks * measured.num_layers)
        self._prefilling = request
        self._totals.computed_tokens += computed
        self._totals.known_tokens += known
        return PREFILL
