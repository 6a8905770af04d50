"""Admits waiting sequences: gives each a seat, its policy, slots in every layer, and a place in the store: one that it
needs, or one for a copy of its prompt."""

from __future__ import annotations

import math
from collections.abc import Collection

from gpu_worker.caches import CacheSet
from gpu_worker.engine.admission.intake import Intake
from gpu_worker.engine.admission.preemption import Preemption
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.errors import ArenaFull, NeverFits, PrefixLoading, StoreSilent, WorkerError
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import Offloader
from gpu_worker.store.prefixes import PrefixChain

# Up to so many tokens a prompt adds less time to another's pass through the layers than one of its own takes before its
# first token: launches, and reading the weights. A longer one would only let who is before it wait. Measured with
# carrel-nano on a CPU; a GPU computes some hundred tokens while it reads the weights.
JOINING_TOKENS = {"cpu": 32, "cuda": 512}


class Admission:
    """Admits a sequence with all it needs, or not at all."""

    def __init__(
        self,
        scheduler: Scheduler,
        intake: Intake,
        caches: CacheSet,
        offloader: Offloader,
        prefixes: PrefixChain | None,
        preemption: Preemption,
        max_joining: int,
    ) -> None:
        """prefixes: names the prefixes that requests may share; None: nothing is shared. max_joining: tokens of a
        prompt that joins others."""
        self._scheduler = scheduler
        self._intake = intake
        self._caches = caches
        self._offloader = offloader
        self._prefixes = prefixes
        self._preemption = preemption
        # What the sequence that was refused last missed in the arena.
        self._missing_bytes = 0.0
        self._max_joining = max_joining

    def expect(self, sequence: Sequence) -> None:
        """Guess how much of a waiting sequence's prompt is known. Asks nobody."""
        if self._prefixes is not None:
            hashes, num_reusable = self._names(sequence)
            num_known = self._offloader.known.count(hashes[:num_reusable])
            sequence.num_expected = num_known * self._prefixes.tokens_per_slab

    def admit(self, sequence: Sequence) -> bool:
        """Whether the sequence runs now, others having given way perhaps; False if it must wait until others end. If it
        `offloads` then it waits for room in the arena.

        Raises NeverFits, RequestError or StoreUnavailable where it never can, StoreSilent where it may be tried again
        once the store answers, and PrefixLoading where soon. This may attach to the store again: see `Offloader.holds`.
        """
        while not self._try(sequence):
            if not self._preemption.make_way(sequence, self._missing_bytes):
                return False
        return True

    def _try(self, sequence: Sequence) -> bool:
        self._missing_bytes = 0.0
        if sequence.offloads and self._must_wait(sequence):
            return False
        sequence.offloads = False
        if not self._scheduler.num_free_seats:
            return False
        self._scheduler.seat(sequence)
        self._intake.choose(sequence, self._caches.num_free_slots)
        if not self._caches.admit(sequence):
            self._scheduler.unseat(sequence)
            return False
        try:
            is_open = self._finds_room(sequence)
        except (PrefixLoading, StoreSilent):
            self._caches.release(sequence)
            self._scheduler.unseat(sequence)
            raise
        except WorkerError:
            self._caches.release(sequence)
            raise
        if not is_open:
            self._caches.release(sequence)
            self._scheduler.unseat(sequence)
            return False
        self._scheduler.admit(sequence)
        return True

    def _finds_room(self, sequence: Sequence) -> bool:
        """Start the sequence in the store; False where it must wait for room there."""
        if sequence.offloads and (missing := self._missing_alone(sequence)):
            if not self._caches.does_without_store(sequence):
                raise NeverFits(
                    f"{sequence.known_tokens} tokens and the index over them need {missing} bytes more than the KV "
                    "store has; send a shorter prompt, or start with a larger --arena-bytes"
                )
            sequence.offloads = False
        if sequence.offloads and self._must_wait(sequence):
            return False
        try:
            sequence.num_cached = self._open(sequence)
        except ArenaFull as error:
            self._missing_bytes = error.missing_bytes
            self._preemption.refused()
            return False
        if not sequence.has_given_way:
            sequence.num_reused = sequence.num_cached
        return True

    def _must_wait(self, sequence: Sequence) -> bool:
        """Whether it must not look for room in the arena now. Then nobody gives way for what else it misses. Raises
        StoreSilent."""
        self._offloader.check_answers()
        if must_wait := self._preemption.must_wait(sequence):
            self._missing_bytes = math.inf
        return must_wait

    def _missing_alone(self, sequence: Sequence) -> int:
        """Bytes that it would miss in an empty arena, for its prompt and the next token."""
        jobs = [one.cache.prompt_job(sequence, one.index) for one in self._caches.of(sequence)]
        return self._offloader.missing_alone(
            sequence.known_tokens + 1, [job for job in jobs if job is not None]
        )

    def next_beside(self, together: list[Sequence], held: Collection[Sequence]) -> Sequence | None:
        """The waiting sequence, none of `held`, whose prompt is to be computed with these, which were admitted just
        now, in one pass; None: no more."""
        found = self._scheduler.next_beside(together, held)
        if found is None or found.num_prefill > self._max_joining:
            return None
        if any(each.prompt_attention() is not None for each in (*together, found)):
            return None
        hashes, num_reusable = self._names(found)
        first = hashes[: min(1, num_reusable)]
        # Once one that begins alike is computed, most of this one is.
        return None if first and any(self._names(other)[0][:1] == first for other in together) else found

    def _open(self, sequence: Sequence) -> int:
        """Start the sequence, or a copy of its prompt, in the store; returns how many of its tokens are there. There is
        room for all that it had when it gave way."""
        hashes, num_reusable = self._names(sequence)
        if sequence.offloads:
            room = max(sequence.num_prefill, sequence.known_tokens if sequence.has_given_way else 0) + 1
            num_known = self._offloader.open(sequence, room, hashes, num_reusable)
        else:
            num_known = self._offloader.copies.open(sequence, hashes, num_reusable)
        if self._prefixes is not None:
            self._caches.find_resident(sequence, hashes, num_known // self._prefixes.tokens_per_slab)
        return num_known

    def _names(self, sequence: Sequence) -> tuple[tuple[bytes, ...], int]:
        """Of the slabs that its prompt fills, and how many of them it may have from others."""
        if self._prefixes is None or not sequence.shares_prompt:
            return (), 0
        num_reusable = self._prefixes.num_reusable(sequence) if sequence.trusts_prefixes else 0
        return self._prefixes.hashes(sequence), num_reusable
