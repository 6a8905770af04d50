"""The store's control: which sequence holds which bytes of the arena. Plain Python, no gRPC, no Ray."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_store.client.ends import SequenceEnd
from kv_store.client.errors import InvalidStoreRequest, PrefixLoading, StoreFull
from kv_store.client.layout import Layout
from kv_store.client.stats import DiskStats, StoreStats
from kv_store.disk.tier import DiskTier
from kv_store.gauges import read_stats
from kv_store.prefixes import check_hashes
from kv_store.sequences import Sequence, check_id, check_length
from kv_store.session_calls import SessionCalls
from kv_store.state import StoreState

_MAX_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class Attachment:
    """The geometry of a worker's arena; the response segment is `response_bytes` from `response_offset`."""

    tokens_per_slab: int
    response_offset: int
    response_bytes: int


def _check_num_tokens(num_tokens: int) -> None:
    if not 0 <= num_tokens <= _MAX_TOKENS:
        raise InvalidStoreRequest(f"num_tokens is {num_tokens}, it must be from 0 to {_MAX_TOKENS}")


class Store:
    """Sequences and their prefixes. Thread-safe; every call of a worker renews its lease.

    sessions: what outlives sequences by name.
    """

    def __init__(self, state: StoreState, tier: DiskTier | None = None) -> None:
        """tier: keeps on a disk what is listed and held, if there is one."""
        self._state = state
        self._tier = tier
        self.sessions = SessionCalls(state, tier)

    def attach(self, worker_id: str, layout: Layout, max_gather_rows: int) -> Attachment:
        """Start a worker's life here; what an earlier life of the same id held is dropped.

        Raises StaleEpoch for a layout that the arena does not hold, StoreFull.
        """
        check_id("worker_id", worker_id)
        state = self._state
        with state.lock:
            if (earlier := state.workers.get(worker_id)) is not None:
                state.drop_worker(earlier)
            self.reap()
            geometry = state.adopt_layout(layout)
            if self._tier is not None:
                self._tier.adopt()
            response_bytes = max_gather_rows * layout.row_format.row_bytes
            slabs = state.allocate_segment(response_bytes, f"{max_gather_rows} rows of response")
            state.add_worker(worker_id, slabs)
            return Attachment(geometry.tokens_per_slab, slabs.start * state.slab_bytes, response_bytes)

    def begin(
        self,
        epoch: int,
        worker_id: str,
        sequence_id: str,
        num_tokens: int,
        prefix_hashes: Items[bytes] = (),
        takes_less: bool = False,
        owner: str = "",
    ) -> tuple[int, npt.NDArray[np.int32]]:
        """Start a sequence, or leave nothing behind: it shares the sealed slabs of the longest known prefix, and has
        slabs for `num_tokens` tokens in all. One that was started already keeps what it has.

        takes_less: where room is missing it has the known prefix only; where none is known it is not started. owner:
        whose what it holds is, what others find of it, and its session (see `Owners`). Returns the number of shared
        tokens and the table int32 [num_layers, slabs_per_layer]. Raises StoreFull and InvalidStoreRequest, and
        PrefixLoading, having begun nothing, while more of the prefix comes from the disk.
        """
        check_id("sequence_id", sequence_id)
        check_length("owner", owner)
        check_hashes(prefix_hashes)
        _check_num_tokens(num_tokens)
        with self._state.entered(epoch, worker_id) as state:
            known = state.sequences.find(worker_id, sequence_id)
            if known is None and self._tier is not None and self._tier.must_wait(prefix_hashes, owner):
                raise PrefixLoading("a prefix comes from the disk: ask again")
            sequence = known or self._start(worker_id, sequence_id, prefix_hashes, owner)
            try:
                self._grow(sequence, num_tokens)
            except StoreFull:
                if known is None and not (takes_less and sequence.num_prefix_tokens):
                    state.drop_sequence(sequence)
                if not takes_less:
                    raise
            except Exception:
                if known is None:
                    state.drop_sequence(sequence)
                raise
            return sequence.num_prefix_tokens, sequence.table

    def reserve(self, epoch: int, worker_id: str, sequence_id: str, num_tokens: int) -> npt.NDArray[np.int32]:
        """Slabs of every layer for `num_tokens` tokens in all: int32 [num_layers, slabs_per_layer].

        All or nothing. Raises StoreFull, NotInStore, InvalidStoreRequest.
        """
        _check_num_tokens(num_tokens)
        with self._state.entered(epoch, worker_id) as state:
            sequence = state.sequences.get(worker_id, sequence_id)
            self._grow(sequence, num_tokens)
            return sequence.table

    def seal(
        self,
        epoch: int,
        worker_id: str,
        sequence_id: str,
        num_tokens: int,
        layer_begin: int,
        layer_end: int,
        prefix_hashes: Items[bytes] = (),
        session_id: str = "",
        session_label: str = "",
    ) -> None:
        """Make tokens below `num_tokens` visible in these layers; wholly filled slabs become immutable.

        With `prefix_hashes`, slabs full in every layer are listed for reuse; with `session_id` those are kept under
        this name after the sequence's end, to be listed for its owner by this label. Sealing less than before is
        harmless. Raises NotInStore, InvalidStoreRequest.
        """
        with self._state.entered(epoch, worker_id) as state:
            sequence = state.sequences.get(worker_id, sequence_id)
            self._seal(sequence, num_tokens, layer_begin, layer_end, prefix_hashes)
            self.sessions.hold(sequence, session_id, session_label)

    def verify(self, epoch: int, worker_id: str, sequence_id: str) -> int:
        """Compare what a sequence shares since its begin with the checksums that were taken when it was listed. Returns
        how many slabs differ: nobody finds those any more. Waits for idle cores. Raises NotInStore."""
        with self._state.entered(epoch, worker_id) as state:
            sequence = state.sequences.get(worker_id, sequence_id)
            num_shared = state.geometry.slabs_for(sequence.num_prefix_tokens)
            shared = sequence.table[:, :num_shared].ravel()
            state.allocator.retain(shared)
        corrupt = np.empty(0, np.int32)
        try:
            corrupt = state.checksums.find_corrupt(shared)
        finally:
            with state.lock:
                # While they are held: else they may be another's by then.
                if corrupt.size:
                    state.forget_corrupt(corrupt)
                state.allocator.release(shared)
        return corrupt.size

    def settle(self) -> None:
        """Wait until all that is listed by now has its checksum, and is on the disk where there is one."""
        self._state.checksums.settle()
        if self._tier is not None:
            self._tier.settle()

    def end(self, epoch: int, worker_id: str, ends: Items[SequenceEnd]) -> None:
        """End sequences in this order; ending an unknown one is harmless, so a retry is safe.

        Raises the first error once all are ended: InvalidStoreRequest for tokens that cannot be sealed, or for a
        sequence that would keep its prefix and has indexes, which alone does not end.
        """
        refused: list[Exception] = []
        with self._state.entered(epoch, worker_id) as state:
            for each in ends:
                sequence = state.sequences.find(worker_id, each.sequence_id)
                if sequence is None:
                    continue
                try:
                    if each.num_tokens:
                        layers = state.geometry.layout.num_layers
                        self._seal(sequence, each.num_tokens, 0, layers, each.prefix_hashes)
                    self.sessions.hold(sequence, each.session_id, each.session_label)
                except Exception as error:
                    # Who ends something asks once: all of it ends, whatever comes of one.
                    refused.append(error)
                if not each.keeps_prefix:
                    state.drop_sequence(sequence)
                elif sequence.indexes or sequence.trainings:
                    refused.append(
                        InvalidStoreRequest(
                            f"sequence {each.sequence_id!r} has indexes over the slabs that it would give up"
                        )
                    )
                else:
                    state.allocator.release(sequence.cut_to_prefix())
        if refused:
            raise refused[0]

    def heartbeat(self, epoch: int, worker_id: str) -> None:
        """Renew the worker's lease and nothing else."""
        with self._state.lock:
            self._state.enter(epoch, worker_id)

    def reap(self) -> int:
        """Release what workers held that were silent too long; returns how many workers."""
        with self._state.lock:
            return self._state.drop_expired()

    def stats(self) -> StoreStats:
        """Gauges of now and counters since the start."""
        with self._state.lock:
            return read_stats(self._state, DiskStats() if self._tier is None else self._tier.stats())

    def _start(self, worker_id: str, sequence_id: str, prefix_hashes: Items[bytes], owner: str) -> Sequence:
        """A new sequence with the slabs of the longest known prefix."""
        state = self._state
        sequence = Sequence(worker_id, sequence_id, state.geometry, owner)
        state.sequences.add(sequence)
        per_slab, counters = sequence.geometry.tokens_per_slab, state.counters
        counters.prefix_lookup_tokens += len(prefix_hashes) * per_slab
        if found := state.prefixes.lookup(prefix_hashes, is_prompt=True):
            table = np.stack(found, axis=1)
            state.allocator.retain(table.ravel())
            sequence.grow(table)
            sequence.num_prefix_tokens = len(found) * per_slab
            counters.prefix_hit_tokens += sequence.num_prefix_tokens
            sequence.sealed[:] = sequence.num_prefix_tokens
            sequence.prefix_hashes = tuple(prefix_hashes[: len(found)])
        if self._tier is not None:
            self._tier.counts.lookup_tokens += (len(prefix_hashes) - len(found)) * per_slab
        return sequence

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        """All or nothing. Raises StoreFull."""
        state = self._state
        added = state.geometry.slabs_for(num_tokens) - sequence.slabs_per_layer
        if added <= 0:
            return
        num_layers = state.geometry.layout.num_layers
        state.make_room(added * num_layers, f"{num_tokens} tokens", sequence.owner)
        after = sequence.table[:, -1] if sequence.slabs_per_layer else None
        sequence.grow(state.allocator.allocate(num_layers, added, after, sequence.owner))

    def _seal(
        self,
        sequence: Sequence,
        num_tokens: int,
        layer_begin: int,
        layer_end: int,
        prefix_hashes: Items[bytes],
    ) -> None:
        check_hashes(prefix_hashes)
        num_layers = self._state.geometry.layout.num_layers
        if not 0 <= layer_begin < layer_end <= num_layers:
            raise InvalidStoreRequest(f"layers {layer_begin} to {layer_end} are not within 0 to {num_layers}")
        if not 0 <= num_tokens <= sequence.capacity:
            raise InvalidStoreRequest(
                f"{num_tokens} tokens cannot be sealed: {sequence.capacity} are reserved"
            )
        known = sequence.prefix_hashes
        common = min(len(known), len(prefix_hashes))
        if tuple(prefix_hashes[:common]) != known[:common]:
            raise InvalidStoreRequest("the prefix hashes differ from those of an earlier call")
        if len(prefix_hashes) > sequence.slabs_per_layer:
            raise InvalidStoreRequest(
                f"{len(prefix_hashes)} prefix hashes for {sequence.slabs_per_layer} slabs of a layer"
            )
        sealed = sequence.sealed[layer_begin:layer_end]
        np.maximum(sealed, num_tokens, out=sealed)
        if len(prefix_hashes) > len(known):
            sequence.prefix_hashes = tuple(prefix_hashes)
        self._publish(sequence)

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.num_tokens // sequence.geometry.tokens_per_slab
        hashes = sequence.prefix_hashes[:full]
        if hashes and not sequence.is_corrupt:
            self._state.checksums.seal(self._state.prefixes.publish(hashes, sequence.table))
            if self._tier is not None:
                self._tier.keep_prefix(hashes)
