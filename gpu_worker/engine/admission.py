"""Admits waiting sequences: gives each a seat, its policy, slots in every layer, and a place in the store: one that it
needs, or one for a copy of its prompt."""

from __future__ import annotations

from gpu_worker.caches import CacheSet
from gpu_worker.engine.intake import Intake
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.errors import CapacityError, StoreUnavailable
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import Offloader
from gpu_worker.store.prefixes import PrefixChain


class Admission:
    """Admits a sequence with all it needs, or not at all."""

    def __init__(
        self,
        scheduler: Scheduler,
        intake: Intake,
        caches: CacheSet,
        offloader: Offloader,
        prefixes: PrefixChain | None,
    ) -> None:
        """prefixes: names the prefixes that requests may share; None: nothing is shared."""
        self._scheduler = scheduler
        self._intake = intake
        self._caches = caches
        self._offloader = offloader
        self._prefixes = prefixes

    def expect(self, sequence: Sequence) -> None:
        """Guess how much of a waiting sequence's prompt is known. Asks nobody."""
        if self._prefixes is not None:
            hashes, num_reusable = self._names(sequence)
            num_known = self._offloader.known.count(hashes[:num_reusable])
            sequence.num_expected = num_known * self._prefixes.tokens_per_slab

    def admit(self, sequence: Sequence) -> bool:
        """Whether the sequence, for which there is a seat, runs now; False if it must wait until others end.

        Raises CapacityError, RequestError or StoreUnavailable where it never can. This may attach to the store again:
        see `Offloader.holds`.
        """
        self._scheduler.seat(sequence)
        self._intake.choose(sequence, self._caches.num_free_slots)
        if not self._caches.admit(sequence):
            self._scheduler.unseat(sequence)
            return False
        try:
            sequence.num_cached = self._open(sequence)
        except CapacityError:
            self._caches.release(sequence)
            if any(self._offloader.holds(other) for other in self._scheduler.offloading()):
                self._scheduler.unseat(sequence)
                return False
            raise
        except StoreUnavailable:
            self._caches.release(sequence)
            raise
        self._scheduler.admit(sequence)
        return True

    def _open(self, sequence: Sequence) -> int:
        """Start the sequence, or a copy of its prompt, in the store; returns how many of its tokens are there."""
        hashes, num_reusable = self._names(sequence)
        if sequence.offloads:
            return self._offloader.open(sequence, sequence.num_prefill + 1, hashes, num_reusable)
        return self._offloader.copies.open(sequence, hashes, num_reusable)

    def _names(self, sequence: Sequence) -> tuple[tuple[bytes, ...], int]:
        """Of the slabs that its prompt fills, and how many of them it may have from others."""
        # Rows of a prompt that is attended in part depend on policy and budget, so they are not shared.
        is_shared = sequence.request.shares_prefix and sequence.prompt_attention() is None
        if self._prefixes is None or not is_shared:
            return (), 0
        return self._prefixes.hashes(sequence), self._prefixes.num_reusable(sequence)
