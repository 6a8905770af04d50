"""Places of requests on the device and in the store."""

from __future__ import annotations

from gpu_worker.caches import CacheSet
from gpu_worker.errors import ArenaFull, NeverFits, WorkerError
from gpu_worker.records import GenerationRequest
from gpu_worker.records.plans import Admit, Admitted, Entered
from gpu_worker.runner.intake import Intake
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import Offloader


class Places:
    """sequences: the requests that wait or run, by id."""

    def __init__(self, intake: Intake, caches: CacheSet, offloader: Offloader) -> None:
        self._intake = intake
        self._caches = caches
        self._offloader = offloader
        self._prefixes = offloader.prefixes
        self.sequences: dict[str, Sequence] = {}

    def enter(self, request: GenerationRequest) -> Entered:
        """Take in a request, which waits. Raises RequestError."""
        sequence = self._intake.sequence(request)
        self.sequences[request.request_id] = sequence
        names, num_reusable = self._prefixes.names(sequence)
        return Entered(
            sequence.num_prefill,
            sequence.capacity,
            sequence.is_open_ended,
            self._prefixes.count_known_tokens(names[:num_reusable]),
            names[0] if names else None,
            num_reusable > 0,
            sequence.prompt_attention() is None,
        )

    def admit(self, plan: Admit) -> Admitted:
        """Give a waiting request slots and a place in the store, or nothing."""
        sequence = self.sequences[plan.request_id]
        sequence.seat, sequence.trusts_prefixes = plan.seat, plan.trusts_prefixes
        sequence.offloads = False
        if plan.policy is not None:
            self._intake.choose(sequence, plan.policy)
        has_slots, missing_bytes, error, is_open = False, 0, None, False
        try:
            has_slots = self._caches.admit(sequence)
            is_open = has_slots and self._open(sequence, plan.may_open)
        except ArenaFull as full:
            missing_bytes = full.missing_bytes
        except WorkerError as other:
            error = other
        needs_arena = sequence.offloads
        if not is_open:
            if has_slots:
                self._caches.release(sequence)
            sequence.seat = -1
        elif not sequence.was_preempted:
            sequence.num_reused = sequence.num_cached
        return Admitted(is_open, needs_arena, sequence.num_cached, missing_bytes, error, self.lost())

    def _open(self, sequence: Sequence, may_open: bool) -> bool:
        """Start a sequence that has slots, or a copy of its prompt, in the store. It gets memory for all that it had
        when it was preempted. Raises NeverFits, ArenaFull and StoreUnavailable."""
        if sequence.offloads and (missing := self._missing_alone(sequence)):
            if not self._caches.does_without_store(sequence):
                raise NeverFits(
                    f"{sequence.known_tokens} tokens and the index over them need {missing} bytes more than the KV "
                    "store has; send a shorter prompt, or start with a larger --arena-bytes"
                )
            sequence.offloads = False
        names, num_reusable = self._prefixes.names(sequence)
        if sequence.offloads:
            self._offloader.link.check_answers()
            if not may_open:
                return False
            room = max(sequence.num_prefill, sequence.known_tokens if sequence.was_preempted else 0) + 1
            sequence.num_cached = self._offloader.extents.open(sequence, room, names, num_reusable)
        else:
            sequence.num_cached = self._offloader.extents.open_copy(sequence, names, num_reusable)
        num_known = sequence.num_cached // self._offloader.client.tokens_per_slab
        self._caches.find_resident(sequence, names, num_known)
        return True

    def _missing_alone(self, sequence: Sequence) -> int:
        """Bytes that it would miss in an empty arena, for its prompt and the next token."""
        jobs = [one.cache.prompt_job(sequence, one.index) for one in self._caches.of(sequence)]
        indexes = [(job.params, job.end - job.begin) for job in jobs if job is not None]
        return self._offloader.client.missing_alone(sequence.known_tokens + 1, indexes)

    @property
    def offloading(self) -> list[Sequence]:
        """The running sequences with rows that go to the arena."""
        return [one for one in self.sequences.values() if one.offloads and one.seat >= 0]

    def lost(self) -> tuple[str, ...]:
        """Return the sequences that lost their rows with an earlier store."""
        return tuple(one.sequence_id for one in self.offloading if one not in self._offloader.extents)
