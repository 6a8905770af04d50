"""A prompt's layers between the device and the slabs of its sequence, whoever needs them there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.device_arena import DeviceArena
from gpu_worker.store.host_path import HostPath, host_bytes
from gpu_worker.store.link import Extent, StoreLink
from kv_store.client import RowsWanted, StoreClient


class SlabRows:
    """By the device where it reaches the arena, else through the host. Every method may raise StoreUnavailable."""

    def __init__(
        self, client: StoreClient, link: StoreLink, arena: DeviceArena, host: HostPath, device: torch.device
    ) -> None:
        self._client = client
        self._link = link
        self._arena = arena
        self._host = host
        self._device = device

    def read(
        self, sequence: Sequence, extent: Extent, layer: int, rows: Tensor, free: Mark | None = None
    ) -> Mark:
        """Start to fill the first rows of a layer [H_kv, n, 2d] with the shared ones; they are there at the mark, and
        nothing else may use them until then. free: from when on they may be written; None: now."""
        # All layers' at once: what is known was written before, so that its memory is registered.
        self._prepare(sequence, extent, len(extent.slabs))
        num_slabs, shared = extent.shared // self._client.tokens_per_slab, rows[:, : extent.shared]
        read = self._arena.read(sequence.seat, layer, extent.slabs[layer, :num_slabs], shared, free)
        if read is None:
            if free is not None:
                free.hold()
            positions = np.arange(extent.shared, dtype=np.int64)
            items = [RowsWanted(sequence.sequence_id, head, positions) for head in range(rows.shape[0])]
            shared.copy_(self._host.gather(layer, items).view(shared.shape))
            read = Mark(self._device)
        return read

    def write(self, sequence: Sequence, extent: Extent, layers: range, rows: Tensor, begin: int = 0) -> Mark:
        """Start to write rows of some layers [L, H_kv, n, 2d], except the shared ones; they must not change until the
        mark. begin: the position of the first, before which all are shared."""
        self._prepare(sequence, extent, layers.stop)
        own, first = rows[:, :, extent.shared - begin :], extent.shared // self._client.tokens_per_slab
        copied = self._arena.write(own, extent.slabs[layers.start : layers.stop, first:])
        if copied is None:
            begun = Mark(self._device)
            for layer, data in zip(layers, host_bytes(own), strict=True):
                self._host.put(sequence.sequence_id, layer, extent.shared, data)
            copied = Mark(self._device, begun)
        return copied

    def _prepare(self, sequence: Sequence, extent: Extent, num_layers: int) -> None:
        """Check that the slabs are still the sequence's, and let the device know those of the first layers."""
        self._link.call(self._client.check)
        if num_layers > extent.num_adopted:
            slabs = extent.slabs[extent.num_adopted : num_layers]
            self._arena.adopt(sequence.seat, slabs, extent.num_adopted)
            extent.num_adopted = num_layers
