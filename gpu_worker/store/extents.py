"""Slabs of the arena that each sequence holds: taken, extended, sealed and released."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gpu_worker.errors import CapacityError, PrefixLoading, WorkerError
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.kv_meter import Fallback
from gpu_worker.store.link import ArenaLink
from gpu_worker.store.prefixes import Prefixes
from gpu_worker.store.sessions import KEPT_NOTHING, Kept, Sessions
from kv_store.client import StaleEpoch, StoreError

Result = TypeVar("Result")

# Slabs of every layer that a sequence asks for at once as it grows.
SLABS_AHEAD = 4


@dataclass(slots=True)
class Extent:
    """Numbers of tokens that a sequence may write to the store, has surely written, and may read.

    shared: first tokens that lie in shared slabs and are never written. hashes: names of the slabs that its prompt
    fills. slabs: int32 [L, slabs of a layer], as the store gave them. num_adopted: layers of which the device knows the
    slabs. is_copy: the sequence does not need what it writes (`Extents.open_copy`).
    """

    reserved: int = 0
    written: int = 0
    sealed: int = 0
    shared: int = 0
    hashes: tuple[bytes, ...] = ()
    slabs: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    num_adopted: int = 0
    is_copy: bool = False

    @property
    def has_own(self) -> bool:
        """Return whether some slabs are not shared, and so written."""
        return self.reserved > self.shared


class Extents:
    """Extents by sequence. A sequence that is not here has no rows in the store; after the store was lost none has.

    token_bytes: bytes of one token's rows in all layers. Methods raise StoreUnavailable, or StoreSilent where they may
    be called again with the same arguments.
    """

    def __init__(self, link: ArenaLink, sessions: Sessions, prefixes: Prefixes) -> None:
        self._link = link
        self._client = link.client
        self._sessions = sessions
        self._prefixes = prefixes
        self._by_name: dict[str, Extent] = {}
        self.token_bytes = self._client.layout.num_layers * self._client.layout.token_bytes

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._by_name

    def __getitem__(self, sequence: Sequence) -> Extent:
        return self._by_name[sequence.sequence_id]

    def open(
        self, sequence: Sequence, num_tokens: int, hashes: tuple[bytes, ...] = (), num_reusable: int = 0
    ) -> int:
        """Start a sequence with space for `num_tokens`, in one call; returns how many of its first tokens the store
        has. Raises ArenaFull that names the missing bytes, and PrefixLoading where it is to be called again soon.

        hashes: names of the slabs that its prompt fills, by which other requests find them; of the first `num_reusable`
        it shares those that are known. The device knows its slabs once layers are stored. After a failure or a restart
        of the store this attaches again: then the rows of earlier sequences are lost.
        """

        def begin() -> Extent:
            if self._link.is_attached:
                try:
                    return self._begin(sequence, num_tokens, hashes, num_reusable)
                except StaleEpoch:
                    # It answers, as a new start that holds nothing of ours; this request has lost nothing.
                    self._link.is_attached = False
            self._attach()
            return self._begin(sequence, num_tokens, hashes, num_reusable)

        return self._with_space(lambda: self._link.call(begin)).shared

    def open_copy(self, sequence: Sequence, hashes: tuple[bytes, ...], num_reusable: int) -> int:
        """Find the known prefix of a prompt that needs no store, and space for a copy of the rest of the slabs that it
        fills, in one call; returns how many of its first tokens are known. Raises PrefixLoading.

        A copy lets other prompts that begin alike find its rows. It is no condition: where the store is full, away or
        lost, the prompt is computed and not copied, and nothing is waited for. hashes, num_reusable: as for `open`.
        """
        if not (hashes and self._link.arena.copies_cheaply and self._link.is_reachable):
            return 0
        num_tokens = len(hashes) * self._client.tokens_per_slab
        try:
            begin = functools.partial(self._begin, sequence, num_tokens, hashes, num_reusable, is_copy=True)
            return self._link.call(begin).shared
        except PrefixLoading:
            raise
        except WorkerError:
            return 0

    def _begin(
        self,
        sequence: Sequence,
        num_tokens: int,
        hashes: tuple[bytes, ...],
        num_reusable: int,
        is_copy: bool = False,
    ) -> Extent:
        """is_copy: where space is missing it only reads the known prefix, and no extent is held without one."""
        name, owner = sequence.sequence_id, self._sessions.owner_of(sequence.request)
        begun = self._client.begin(name, num_tokens, hashes[:num_reusable], is_copy, owner)
        shared, reserved = begun.num_shared, begun.slab_table.shape[1] * self._client.tokens_per_slab
        extent = Extent(reserved, shared, shared, shared, hashes, begun.slab_table, is_copy=is_copy)
        if reserved:
            self._by_name[name] = extent
        return extent

    def own_bytes(self, sequence: Sequence) -> int:
        """Return the bytes of the arena that only this sequence holds: free once it is released."""
        extent = self._by_name.get(sequence.sequence_id)
        return 0 if extent is None else (extent.reserved - extent.shared) * self.token_bytes

    def known_bytes(self, sequence: Sequence) -> int:
        """Return the bytes of the arena that a copy of the sequence's prompt reads. Others may read the same."""
        extent = self._by_name.get(sequence.sequence_id)
        return extent.shared * self.token_bytes if extent is not None and extent.is_copy else 0

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Reserve space for `num_tokens` in all, and let the device know the slabs. Asks the store only for missing
        slabs, and while it has space for some slabs more, so that few steps ask. Raises ArenaFull."""
        if num_tokens <= self[sequence].reserved:
            return
        ahead = min(num_tokens + SLABS_AHEAD * self._client.tokens_per_slab, sequence.capacity)
        try:
            self._reserve(sequence, max(num_tokens, ahead))
        except CapacityError:
            self._with_space(lambda: self._reserve(sequence, num_tokens))
        self._link.arena.adopt(sequence.seat, self[sequence].slabs)

    def _reserve(self, sequence: Sequence, num_tokens: int) -> None:
        extent, per_slab = self[sequence], self._client.tokens_per_slab
        with self._link.meter.waiting():
            extent.slabs = self._link.call(lambda: self._client.reserve(sequence.sequence_id, num_tokens))
        extent.reserved = -(-num_tokens // per_slab) * per_slab

    def _with_space(self, ask: Callable[[], Result]) -> Result:
        """Return the result of `ask`. Where space is missing, copies are dropped, which no request needs."""
        try:
            return ask()
        except CapacityError:
            if not self.drop_copies():
                raise
            return ask()

    def drop_copies(self) -> bool:
        """Free the slabs of all copies that are being written; False where there is none. Copies keep the known prefix
        that they read."""
        written = {name: one for name, one in self._by_name.items() if one.is_copy and one.has_own}
        if written:
            self._link.arena.wait_for_writes()
        for name, extent in written.items():
            num_shared = extent.shared // self._client.tokens_per_slab
            extent.reserved, extent.slabs = extent.shared, extent.slabs[:, :num_shared]
            self._link.call(functools.partial(self._client.cut_to_prefix, name))
        return bool(written)

    def seal(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the tokens below `num_tokens` readable once all are written; no call if they already are."""
        extent = self[sequence]
        if num_tokens > extent.sealed:
            with self._link.meter.waiting():
                self._link.arena.wait()
                self._link.call(lambda: self._client.seal(sequence.sequence_id, num_tokens))
            extent.sealed = num_tokens

    def release(self, sequence: Sequence, num_tokens: int = 0, kept: Kept = KEPT_NOTHING) -> None:
        """Free the sequence's slabs, or its copy's; in a silent store once it answers. Never waits for the store.
        Nothing on the device may write to the slabs any more: other sequences get them.

        num_tokens: tokens that are sealed before, in all layers; 0: none. kept: the parts that the store keeps of them.
        """
        if self._by_name.pop(sequence.sequence_id, None) is None:
            return
        self._link.arena.forget(sequence.seat)
        self._client.end(sequence.sequence_id, num_tokens, *kept)
        self._prefixes.add(kept.hashes)

    def stop_offloading(self, sequence: Sequence) -> None:
        """Release the rows of a sequence that needs no store from now on."""
        self.release(sequence)
        sequence.offloads = False
        self._link.meter.fallbacks[Fallback.WITHOUT_STORE] += 1

    def renew(self) -> bool:
        """Attach again when a lost store answers; True if so, and then all rows are lost. Never waits for a store that
        does not answer. The arena of one that is gone is released once no sequence has rows there."""
        if not self._by_name:
            self._link.unmap_lost()
        if not self._link.must_attach():
            return False
        # If it went again, the next call of this reports it.
        with contextlib.suppress(StoreError):
            self._attach()
        return True

    def _attach(self) -> None:
        # Nothing of before is held from here on, even if no store is there.
        self._by_name.clear()
        self._prefixes.clear()
        self._link.attach()
