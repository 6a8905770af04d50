"""The store's arena as kernels see it: its bytes, and the slabs of every seat."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.kernels.rows import ArenaLayout, arena_offsets
from gpu_worker.row_format import row_word
from gpu_worker.store.host_registration import (
    GRANULE_BYTES,
    HostRegistration,
    device_tensor,
    register_with_cuda,
)
from kv_store.client import StoreClient


class ArenaView:
    """One attachment's arena; the next one has another view, and steps captured over this one are void.

    bytes: uint8 [arena bytes], of the host's memory but on the device. slab_tables: int32 [seats, L, I], the slabs
    that hold a seat's tokens, -1 for none; written in place, on the current stream. A device may touch the bytes of
    slabs in the table only. host: the same bytes for copies. granule_bytes: no copy may cross a multiple of it.
    used_bytes: of a slab's rows, its first bytes. word: the widest type of which a row is a whole number.
    """

    def __init__(
        self,
        mapping: npt.NDArray[np.uint8],
        layout: ArenaLayout,
        num_kv_heads: int,
        table_shape: tuple[int, int, int],
        device: torch.device,
        registration: HostRegistration | None = None,
    ) -> None:
        """registration: of the mapping, where the device needs one. Raises RegistrationFailed."""
        self.layout = layout
        self.num_kv_heads = num_kv_heads
        self.num_slabs = mapping.nbytes // layout.slab_bytes
        self.used_bytes = num_kv_heads * layout.tokens_per_slab * layout.row_format.row_bytes
        self.word = row_word(layout.row_format.row_bytes)
        self._registration = registration
        self._device = device
        # Written outside inference mode too: an aborted request leaves between two steps.
        with torch.inference_mode(False):
            self.host = torch.from_numpy(mapping)
            self.bytes = self.host
            if device.type == "cuda":
                assert registration is not None, "a GPU reads registered memory only"
                registration.cover(np.zeros(1, np.int64))
                self.bytes = device_tensor(mapping, device)
            self.slab_tables = torch.full(table_shape, -1, dtype=torch.int32, device=device)
            self._layers = torch.arange(table_shape[1], device=device)

    @property
    def granule_bytes(self) -> int:
        return self._registration.granule_bytes if self._registration else self.host.numel()

    @property
    def is_settled(self) -> bool:
        """Return whether each slab that comes into use is already registered, or was refused."""
        return self._registration is None or self._registration.is_settled

    def adopt(self, seat: int, table: npt.NDArray[np.int32], layer_begin: int = 0) -> None:
        """Give a seat its slabs, int32 [n layers from `layer_begin`, n slabs]. Raises RegistrationFailed."""
        if self._registration:
            self._registration.cover(table.astype(np.int64) * self.layout.slab_bytes)
        # The client's is read-only, which PyTorch does not know.
        slabs = torch.from_numpy(np.array(table))
        if self._device.type == "cuda":
            slabs = slabs.pin_memory()
        num_layers, num_slabs = table.shape
        target = self.slab_tables[seat, layer_begin : layer_begin + num_layers, :num_slabs]
        target.copy_(slabs, non_blocking=True)

    def forget(self, seat: int) -> None:
        """Remove a seat's slabs."""
        self.slab_tables[seat] = -1

    def offsets(self, seats: Tensor, positions: Tensor) -> Tensor:
        """Return where the rows of one position of each seat begin, in every layer: int64 [B, L, H_kv]; -1 for none.

        seats, positions: int64 [B]; a position of -1 has none.
        """
        num_layers = self._layers.shape[0]
        rows = (seats[:, None] * num_layers + self._layers).flatten()
        every = positions[:, None].expand(-1, num_layers).reshape(-1, 1, 1).expand(-1, self.num_kv_heads, 1)
        found = arena_offsets(self.layout, self.num_slabs, self.slab_tables.flatten(0, 1), rows, every)
        return found.view(-1, num_layers, self.num_kv_heads)

    def close(self) -> None:
        """Release the bytes; call it before the client unmaps them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._registration:
            self._registration.close()
        self.bytes = self.host = torch.empty(0, dtype=torch.uint8)


def map_arena(client: StoreClient, num_seats: int, max_model_len: int, device: torch.device) -> ArenaView:
    """Return the arena of a client whose transport is zero_copy. Raises RegistrationFailed."""
    mapping, layout = client.arena, client.layout
    num_slabs = max_model_len // client.tokens_per_slab + 1
    registration = None
    if device.type == "cuda":
        # Both are powers of two: no slab crosses from one granule into the next.
        registration = register_with_cuda(mapping, max(GRANULE_BYTES, client.slab_bytes), device)
        registration.start()
    return ArenaView(
        mapping,
        ArenaLayout(client.slab_bytes, client.tokens_per_slab, layout.row_format),
        layout.num_kv_heads,
        (num_seats, layout.num_layers, num_slabs),
        device,
        registration,
    )
