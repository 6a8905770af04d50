"""The worker's side of the arena: room and rows of sequences. Store errors become the worker's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.errors import CapacityError, StoreSilent
from gpu_worker.policies.recall import IndexJob
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.arena import ArenaView
from gpu_worker.store.device_arena import DeviceArena
from gpu_worker.store.host_path import HostPath
from gpu_worker.store.kv_meter import Fallback, KVMeter
from gpu_worker.store.link import Extent, StoreLink
from gpu_worker.store.prefixes import KnownPrefixes
from gpu_worker.store.prompt_copies import PromptCopies
from gpu_worker.store.reads import StoreReads
from gpu_worker.store.sessions import Kept, Sessions
from gpu_worker.store.slab_rows import SlabRows
from gpu_worker.store.trainings import IndexTrainings
from kv_store.client import StoreClient

Result = TypeVar("Result")

# Of every layer, that a sequence asks for at once as it grows.
SLABS_AHEAD = 4


class Offloader:
    """Moves rows between the device and the arena. Every method may raise StoreUnavailable, or StoreSilent where it may
    be called again with the same arguments.

    trainings: of indexes. reads: of rows that the device cannot reach itself, and selections by the store. copies: of
    prompts that need no store. known: what of prompts the store likely has. sessions: of its callers. meter:
    of all that the host does for rows.
    """

    def __init__(
        self,
        client: StoreClient,
        num_layers: int,
        device: torch.device,
        *,
        num_seats: int = 0,
        max_model_len: int = 0,
        hides_training: bool = False,
        model: bytes = b"",
    ) -> None:
        """num_seats, max_model_len: of `arena`; without seats there is none. hides_training: let the store bound the
        training of an index by the layer's prefill time; else results do not depend on time. model: see `Sessions`."""
        self._client = client
        self._num_layers = num_layers
        # Of one token's rows in all layers.
        self.token_bytes = num_layers * client.layout.token_bytes
        self._extents: dict[str, Extent] = {}
        self.meter = KVMeter()
        self._arena = DeviceArena(client, num_seats, max_model_len, device, self.meter)
        self.known = KnownPrefixes()
        self._link = StoreLink(client, self._arena, self._extents, self.known, self.meter)
        self._call = self._link.call
        self._host = HostPath(client, self._link, self.meter, device)
        self._rows = SlabRows(client, self._link, self._arena, self._host, device)
        self.sessions = Sessions(client, model)
        self.copies = PromptCopies(
            client, self._link, self._arena, self._rows, self._extents, self.sessions, device
        )
        self.trainings = IndexTrainings(client, self._link, hides_training)
        self.reads = StoreReads(client, self._link, self._host, self._extents, self.meter, self.seal)
        self.offloaded_bytes = 0

    @property
    def arena(self) -> ArenaView | None:
        """Where the device moves rows itself; None where they go through the host (`put_token`, `fetch`).

        `open` may replace it, and `reserve` and `put_layers` may find that there is none any more.
        """
        return self._arena.view

    @property
    def is_settled(self) -> bool:
        """Whether the device can reach all of the arena that it ever will."""
        return self.arena is None or self.arena.is_settled

    @property
    def selects_in_store(self) -> bool:
        """Whether indexes stay in the store, which then selects (`select`)."""
        return self._client.selects_in_store

    @property
    def is_reachable(self) -> bool:
        """Whether the store that holds our sequences answered when last asked; any thread may ask."""
        return self._link.is_reachable

    @property
    def silent_seconds(self) -> float:
        """How long the store has been silent; 0 while it answers, or is gone."""
        return self._link.silent_seconds

    @property
    def num_sequences(self) -> int:
        """Sequences that hold room in the store."""
        return len(self._extents)

    @property
    def copies_aside(self) -> bool:
        """Whether `put_layers` returns before the rows are copied."""
        return self._arena.copies_aside

    def open(
        self, sequence: Sequence, num_tokens: int, hashes: tuple[bytes, ...] = (), num_reusable: int = 0
    ) -> int:
        """Start a sequence with room for `num_tokens`, in one call; returns how many of its first tokens the store has.
        Raises ArenaFull that names the missing bytes, and PrefixLoading where it is to be called again soon.

        hashes: names of the slabs that its prompt fills, by which other requests find them; of the first
        `num_reusable` it shares those that are known. Its slabs reach `arena` as layers are put (`put_layers`). After a
        failure or a restart of the store this attaches again: then what earlier sequences held is lost (`holds`).
        """
        name, owner = sequence.sequence_id, self.sessions.owner_of(sequence.request)
        extent = self._with_room(
            lambda: self._call(lambda: self._link.begin(name, num_tokens, hashes, num_reusable, owner))
        )
        return extent.shared

    def missing_alone(self, num_tokens: int, jobs: list[IndexJob]) -> int:
        """Bytes that a sequence of so many tokens, with the indexes of these jobs, would miss in an empty arena."""
        indexes = [(job.params, job.end - job.begin) for job in jobs]
        return self._client.missing_alone(num_tokens, indexes)

    def own_bytes(self, sequence: Sequence) -> int:
        """Of the arena, that only this sequence holds: free once it is released."""
        extent = self._extents.get(sequence.sequence_id)
        return 0 if extent is None else (extent.reserved - extent.shared) * self.token_bytes

    def check_answers(self) -> None:
        """Raises StoreSilent while the store is silent. Makes no call."""
        if self.silent_seconds:
            raise StoreSilent("the KV store does not answer")

    def renew(self) -> bool:
        """Check the store without waiting for it; true when this attached again (`holds`)."""
        return self._link.renew()

    def holds(self, sequence: Sequence) -> bool:
        """Whether the store has the sequence's rows; false once this attached again."""
        return sequence.sequence_id in self._extents

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Reserve room for `num_tokens` in all, in `arena` too. Asks the store only for missing slabs, and while it has
        room for some slabs more, so that few steps ask.

        Raises ArenaFull.
        """
        if num_tokens <= self._extents[sequence.sequence_id].reserved:
            return
        ahead = min(num_tokens + SLABS_AHEAD * self._client.tokens_per_slab, sequence.capacity)
        name = sequence.sequence_id
        try:
            self._link.reserve(name, max(num_tokens, ahead))
        except CapacityError:
            self._with_room(lambda: self._link.reserve(name, num_tokens))
        self._arena.adopt(sequence.seat, self._extents[name].slabs)

    def _with_room(self, ask: Callable[[], Result]) -> Result:
        """Its result. Where room is missing copies, which nobody needs, give way."""
        try:
            return ask()
        except CapacityError:
            if not self.copies.give_way():
                raise
            return ask()

    def load_layer(self, sequence: Sequence, layer: int, rows: Tensor, free: Mark | None = None) -> Mark:
        """Start to fill the first rows of a layer [H_kv, n, 2d] with the shared ones. See `SlabRows.read`."""
        return self._rows.read(sequence, self._extents[sequence.sequence_id], layer, rows, free)

    def verify(self, sequence: Sequence) -> Future[int] | None:
        """Start to compare the shared rows with their checksums: how many slabs are corrupt. See `StoreLink.verify`."""
        return self._link.verify(sequence)

    def put_layers(self, sequence: Sequence, layers: range, rows: Tensor, begin: int = 0) -> Mark:
        """Start to write prefilled layers, except the shared rows; `seal_layers` follows at the mark. rows:
        [L, H_kv, n, 2d], from the position `begin` on, not to be changed until then."""
        return self._rows.write(sequence, self._extents[sequence.sequence_id], layers, rows, begin)

    def seal_layers(self, sequence: Sequence, layers: range, num_tokens: int) -> None:
        """Make copied layers readable, in one call."""
        extent = self._extents[sequence.sequence_id]
        # A prefix is one once all layers have it.
        is_whole = layers.stop == self._num_layers
        keeping = (
            self.sessions.keeping(sequence.request, extent.hashes)
            if is_whole
            else contextlib.nullcontext(Kept())
        )
        with keeping as kept:
            self._link.seal(sequence.sequence_id, num_tokens, layers, *kept)
        extent.written = extent.sealed = num_tokens
        self.offloaded_bytes += len(layers) * (num_tokens - extent.shared) * self._client.layout.token_bytes

    def put_token(self, sequence: Sequence, position: int, data: np.ndarray) -> None:
        """Write one token of every layer, and seal at every full slab; while the store is silent, at a later token.
        data: uint8 [L, H_kv, row_bytes]."""
        with self.meter.offload.timed():
            self.reserve(sequence, position + 1)
            for layer in range(self._num_layers):
                self._host.put(sequence.sequence_id, layer, position, data[layer][:, None])
            self._extents[sequence.sequence_id].written = position + 1
            per_slab = self._client.tokens_per_slab
            with contextlib.suppress(StoreSilent):
                self.seal(sequence, (position + 1) // per_slab * per_slab)
        self.offloaded_bytes += data.nbytes

    def wrote(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the device writes the tokens below `num_tokens` in every layer itself, and may not be done yet: who
        needs them in the store seals them."""
        extent = self._extents[sequence.sequence_id]
        self.offloaded_bytes += (num_tokens - extent.written) * self.token_bytes
        extent.written = num_tokens

    def seal(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the tokens below `num_tokens` readable once all are written; no call if they already are."""
        extent = self._extents[sequence.sequence_id]
        if num_tokens > extent.sealed:
            with self.meter.waiting():
                self._arena.wait()
                self._call(lambda: self._client.seal(sequence.sequence_id, num_tokens))
            extent.sealed = num_tokens

    @property
    def num_corrupt(self) -> int:
        """See `StoreClient.num_corrupt`."""
        return self._client.num_corrupt

    def reset_counts(self) -> None:
        """Count bytes, and what `meter` counts, from zero again."""
        self.offloaded_bytes = self.reads.fetched_bytes = self.copies.copied_bytes = 0
        self.meter.clear()

    def check(self) -> None:
        """Raises StoreUnavailable once the slabs of our sequences may be given to others. Makes no call."""
        self._link.check()

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's slabs, or its copy's, once nothing on the device writes to them. Never waits for the
        store."""
        self._link.end(sequence.sequence_id, sequence.seat)

    def go_on_without(self, sequence: Sequence) -> None:
        """A sequence that can go on without its rows here gives them up."""
        self.release(sequence)
        sequence.offloads = False
        self.meter.fallbacks[Fallback.WITHOUT_STORE] += 1

    def close(self) -> None:
        self._arena.close()
        self._client.close()
