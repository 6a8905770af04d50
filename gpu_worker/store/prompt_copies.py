"""Prompts that need no store, kept in the arena all the same: those that begin alike find them there."""

from __future__ import annotations

import functools
from concurrent.futures import Future

import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.errors import PrefixLoading, PrefixLost, WorkerError
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.device_arena import DeviceArena
from gpu_worker.store.link import Extent, StoreLink
from gpu_worker.store.sessions import Sessions
from gpu_worker.store.slab_rows import SlabRows
from kv_store.client import StoreClient


class PromptCopies:
    """Writes prompts through to the arena while they are computed, and reads back what is known of them.

    A copy is no condition: where the store is full, away or lost, the prompt is computed and not kept, and nothing is
    waited for. So only `load_layer` raises, and `open` where it is to be called again. A copy holds room in the arena
    for as long as its prompt is computed; from then on it is a prefix like others, which goes when the room is needed.
    """

    def __init__(
        self,
        client: StoreClient,
        link: StoreLink,
        arena: DeviceArena,
        rows: SlabRows,
        extents: dict[str, Extent],
        sessions: Sessions,
        device: torch.device,
    ) -> None:
        self._client = client
        self._link = link
        self._arena = arena
        self._rows = rows
        self._extents = extents
        self._sessions = sessions
        self._device = device
        self.copied_bytes = 0

    @property
    def _is_cheap(self) -> bool:
        """Whether rows are moved beside computing, or by the processor that computes."""
        return self._arena.copies_aside or (self._device.type == "cpu" and not self._client.selects_in_store)

    def open(self, sequence: Sequence, hashes: tuple[bytes, ...], num_reusable: int) -> int:
        """Find what is known of a prompt, and room for the rest of the slabs that it fills, in one call; returns how
        many of its first tokens are known. hashes, num_reusable: as for `Offloader.open`. Raises PrefixLoading."""
        if not (hashes and self._is_cheap and self._link.is_reachable):
            return 0
        room = len(hashes) * self._client.tokens_per_slab
        name, owner = sequence.sequence_id, self._sessions.owner_of(sequence.request)
        try:
            extent = self._link.call(
                lambda: self._link.begin_attached(name, room, hashes, num_reusable, owner, is_copy=True)
            )
        except PrefixLoading:
            raise
        except WorkerError:
            return 0
        return extent.shared

    def holds(self, sequence: Sequence) -> bool:
        """Whether a copy of the sequence's prompt is read or written."""
        return self._extent(sequence) is not None

    def known_bytes(self, sequence: Sequence) -> int:
        """Of the arena, that a copy of the sequence's prompt reads. Others may read the same."""
        extent, layout = self._extent(sequence), self._client.layout
        return 0 if extent is None else extent.shared * layout.num_layers * layout.token_bytes

    def load_layer(self, sequence: Sequence, layer: int, rows: Tensor, free: Mark | None = None) -> Mark:
        """Start to fill the first rows of a layer [H_kv, n, 2d] with the known ones, as `SlabRows.read` does. Raises
        PrefixLost: compute all of them."""
        extent = self._extent(sequence)
        if extent is None:
            raise PrefixLost("the KV store came back empty while a prefix was read")
        try:
            return self._rows.read(sequence, extent, layer, rows, free)
        except WorkerError as error:
            raise PrefixLost(f"a prefix could not be read: {error}") from error

    def verify(self, sequence: Sequence) -> Future[int] | None:
        """See `Offloader.verify`."""
        return self._link.verify(sequence) if self.holds(sequence) else None

    def put_layers(self, sequence: Sequence, layers: range, rows: Tensor, begin: int = 0) -> Mark | None:
        """Start to write computed layers [L, H_kv, n, 2d], from the position `begin` on, which must not change until
        the mark; None where there is no copy."""
        extent = self._extent(sequence)
        if extent is None:
            return None
        if not _is_written(extent):
            return Mark(self._device)
        try:
            return self._rows.write(sequence, extent, layers, rows[:, :, : extent.reserved - begin], begin)
        except WorkerError:
            # What is still to be read of a prefix is lost too: `load_layer` tells.
            self._arena.wait_for_writes()
            self._link.end(sequence.sequence_id, sequence.seat)
            return None

    def end(self, sequence: Sequence) -> None:
        """Let others find a prompt of which all layers are copied, and let go of it; never waits. No error without a
        copy."""
        extent = self._extent(sequence)
        if extent is None:
            return
        num_tokens, hashes = (extent.reserved, extent.hashes) if _is_written(extent) else (0, ())
        layout, name = self._client.layout, sequence.sequence_id
        self.copied_bytes += max(0, num_tokens - extent.shared) * layout.num_layers * layout.token_bytes
        # Behind the last layer's mark nothing uses its slabs.
        with self._sessions.keeping(sequence.request, hashes) as kept:
            self._link.end(name, sequence.seat, num_tokens, *kept)

    def give_way(self) -> bool:
        """Give up the room of all copies that are being written; False where there is none. What they read they keep.
        Raises StoreUnavailable."""
        written = {
            name: extent for name, extent in self._extents.items() if extent.is_copy and _is_written(extent)
        }
        if written:
            self._arena.wait_for_writes()
        for name, extent in written.items():
            num_shared = extent.shared // self._client.tokens_per_slab
            extent.reserved, extent.slabs = extent.shared, extent.slabs[:, :num_shared]
            self._link.call(functools.partial(self._client.cut_to_prefix, name))
        return bool(written)

    def _extent(self, sequence: Sequence) -> Extent | None:
        extent = self._extents.get(sequence.sequence_id)
        return extent if extent is not None and extent.is_copy else None


def _is_written(extent: Extent) -> bool:
    return extent.reserved > extent.shared
