"""The worker's side of the arena: rows of sequences on their way out and in."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.errors import PrefixLost, StoreSilent, WorkerError
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.device_arena import DeviceArena
from gpu_worker.store.extents import Extent, Extents
from gpu_worker.store.host_rows import HostRows, host_bytes
from gpu_worker.store.kv_meter import KVMeter
from gpu_worker.store.link import ArenaLink
from gpu_worker.store.prefixes import Prefixes
from gpu_worker.store.sessions import KEPT_NOTHING, Sessions
from kv_store.client import StoreClient


class Offloader:
    """Moves rows between the device and the arena: by the device where it reaches the arena, else through the host.

    A sequence that offloads needs its rows there; methods raise StoreUnavailable, or StoreSilent where they may be
    called again with the same arguments. Another sequence may have a copy of its prompt there (`Extents.open_copy`),
    which the same methods store and load; of errors it sees PrefixLost only.

    client: for values that need no call. link: calls to the store. arena: as the device reaches it. extents: the slabs
    that sequences hold. host: rows that pass through the host. prefixes, sessions: names of prompts in the store.
    meter: times of the host's work for rows. offloaded_bytes: bytes of rows that were written.
    """

    def __init__(
        self,
        client: StoreClient,
        device: torch.device,
        *,
        num_seats: int = 0,
        max_model_len: int = 0,
        hides_training: bool = False,
        model: bytes = b"",
        prefixes: Prefixes | None = None,
    ) -> None:
        """num_seats, max_model_len: of `arena`; without seats the device does not reach it. hides_training: let the
        store bound the training of an index by the layer's prefill time; else results do not depend on time. model: see
        `Sessions`. prefixes: None: prompts share nothing."""
        self.client = client
        self._device = device
        self.meter = KVMeter()
        self.arena = DeviceArena(client, num_seats, max_model_len, device, self.meter)
        self.link = ArenaLink(client, self.arena, self.meter, hides_training)
        self.sessions = Sessions(client, model)
        self.prefixes = prefixes or Prefixes()
        self.extents = Extents(self.link, self.sessions, self.prefixes)
        self.host = HostRows(self.link, self.extents, device)
        self.offloaded_bytes = 0

    def verify(self, sequence: Sequence) -> Future[int] | None:
        """Start to compare the shared rows with their checksums: how many slabs are corrupt; None where nothing is
        shared. The future raises StoreError."""
        is_shared = sequence.num_cached and sequence in self.extents
        return self.client.verify(sequence.sequence_id) if is_shared else None

    def load_layer(self, sequence: Sequence, layer: int, rows: Tensor, free: Mark | None = None) -> Mark:
        """Start to fill the first rows of a layer [H_kv, n, 2d] with the shared ones; they are there at the mark, and
        nothing else may use them until then. Raises PrefixLost where a prompt without an extent must compute them.

        free: mark from which on they may be written; None: now.
        """
        if not (sequence.offloads or sequence in self.extents):
            raise PrefixLost("the KV store came back empty while a prefix was read")
        if not self.extents[sequence].is_copy:
            return self._load(sequence, layer, rows, free)
        try:
            return self._load(sequence, layer, rows, free)
        except WorkerError as error:
            raise PrefixLost(f"a prefix could not be read: {error}") from error

    def _load(self, sequence: Sequence, layer: int, rows: Tensor, free: Mark | None) -> Mark:
        extent = self.extents[sequence]
        # All layers' at once: what is known was written before, so that its memory is registered.
        self._adopt(sequence, extent, len(extent.slabs))
        num_slabs, shared = extent.shared // self.client.tokens_per_slab, rows[:, : extent.shared]
        read = self.arena.read(extent.slabs[layer, :num_slabs], shared, free)
        if read is None:
            if free is not None:
                free.hold()
            shared.copy_(self.host.load_heads(sequence, layer, extent.shared, rows.shape[0]))
            read = Mark(self._device)
        return read

    def store_layers(self, sequence: Sequence, layers: range, rows: Tensor, begin: int = 0) -> Mark | None:
        """Start to write prefilled layers, except the shared rows; `seal_layers` or `seal_copy` follows at the mark.
        None where nothing is to be written.

        rows: [L, H_kv, n, 2d], not to be changed until the mark. begin: the position of the first row, before which
        all are shared.
        """
        if not (sequence.offloads or sequence in self.extents):
            return None
        extent = self.extents[sequence]
        if not extent.is_copy:
            return self._store(sequence, extent, layers, rows, begin)
        if not extent.has_own:
            return Mark(self._device)
        try:
            return self._store(sequence, extent, layers, rows[:, :, : extent.reserved - begin], begin)
        except WorkerError:
            # What is still to be read of a prefix is lost too: `load_layer` reports it.
            self.arena.wait_for_writes()
            self.extents.release(sequence)
            return None

    def _store(self, sequence: Sequence, extent: Extent, layers: range, rows: Tensor, begin: int) -> Mark:
        self._adopt(sequence, extent, layers.stop)
        own, first = rows[:, :, extent.shared - begin :], extent.shared // self.client.tokens_per_slab
        copied = self.arena.write(own, extent.slabs[layers.start : layers.stop, first:])
        if copied is None:
            begun = Mark(self._device)
            for layer, data in zip(layers, host_bytes(own), strict=True):
                self.host.store(sequence, layer, extent.shared, data)
            copied = Mark(self._device, begun)
        return copied

    def _adopt(self, sequence: Sequence, extent: Extent, num_layers: int) -> None:
        """Check that the slabs are still the sequence's, and let the device know those of the first layers."""
        self.link.check()
        if num_layers > extent.num_adopted:
            slabs = extent.slabs[extent.num_adopted : num_layers]
            self.arena.adopt(sequence.seat, slabs, extent.num_adopted)
            extent.num_adopted = num_layers

    def seal_layers(self, sequence: Sequence, layers: range, num_tokens: int) -> None:
        """Make copied layers of a sequence that offloads readable, in one call."""
        extent, layout = self.extents[sequence], self.client.layout
        # A prefix is one once all layers have it.
        is_whole = layers.stop == layout.num_layers
        keeping = (
            self.sessions.keeping(sequence.request, extent.hashes)
            if is_whole
            else contextlib.nullcontext(KEPT_NOTHING)
        )
        with keeping as kept:
            self.link.call(
                lambda: self.client.seal(sequence.sequence_id, num_tokens, layers.start, layers.stop, *kept)
            )
            self.prefixes.add(kept.hashes)
        extent.written = extent.sealed = num_tokens
        self.offloaded_bytes += len(layers) * (num_tokens - extent.shared) * layout.token_bytes

    def seal_copy(self, sequence: Sequence) -> None:
        """Let others find a prompt of which all layers are copied, and release the copy; never waits. Does nothing
        without a copy."""
        if sequence not in self.extents or not self.extents[sequence].is_copy:
            return
        extent = self.extents[sequence]
        num_tokens, hashes = (extent.reserved, extent.hashes) if extent.has_own else (0, ())
        self.offloaded_bytes += max(0, num_tokens - extent.shared) * self.extents.token_bytes
        # Behind the last layer's mark nothing uses its slabs.
        with self.sessions.keeping(sequence.request, hashes) as kept:
            self.extents.release(sequence, num_tokens, kept)

    def store_token(self, sequence: Sequence, position: int, data: npt.NDArray[np.uint8]) -> None:
        """Write one token of every layer, and seal at every full slab; while the store is silent, at a later token.
        data: uint8 [L, H_kv, row_bytes]."""
        with self.meter.offload.timed():
            self.extents.reserve(sequence, position + 1)
            for layer, rows in enumerate(data):
                self.host.store(sequence, layer, position, rows[:, None])
            self.extents[sequence].written = position + 1
            per_slab = self.client.tokens_per_slab
            with contextlib.suppress(StoreSilent):
                self.extents.seal(sequence, (position + 1) // per_slab * per_slab)
        self.offloaded_bytes += data.nbytes

    def note_written(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the device writes the tokens below `num_tokens` in every layer itself, and may not be done yet:
        `Extents.seal` waits for them."""
        extent = self.extents[sequence]
        self.offloaded_bytes += (num_tokens - extent.written) * self.extents.token_bytes
        extent.written = num_tokens

    def reset_counts(self) -> None:
        """Count bytes, and what `meter` counts, from zero again."""
        self.offloaded_bytes = self.host.fetched_bytes = 0
        self.meter.clear()

    def close(self) -> None:
        self.arena.close()
        self.client.close()
