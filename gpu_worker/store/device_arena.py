"""The arena of a store that may be restarted, as long as the device can reach it directly."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.errors import ConfigError
from gpu_worker.store.arena import ArenaView, map_arena
from gpu_worker.store.host_registration import RegistrationFailed, allow_locking, too_low
from gpu_worker.store.kv_meter import Fallback, KVMeter
from gpu_worker.store.layer_copies import LayerCopies
from kv_store.client import StoreClient

logger = logging.getLogger(__name__)


class DeviceArena:
    """The arena of the store that the client is attached to. Without a view every method does nothing.

    view: None where rows must go through the host: another transport than zero_copy, no seats, or memory that CUDA does
    not register, which is logged once. `map` replaces it, and `adopt` may find that CUDA does not register more.

    Raises ConfigError at the start if memory is refused because the memlock limit is too low.
    """

    def __init__(
        self, client: StoreClient, num_seats: int, max_model_len: int, device: torch.device, meter: KVMeter
    ) -> None:
        self._client = client
        self._num_seats = num_seats
        self._max_model_len = max_model_len
        self._device = device
        self._meter = meter
        self._is_refused = num_seats == 0
        self.view: ArenaView | None = None
        self._copies: LayerCopies | None = None
        self.map()
        if self._is_refused and num_seats and (reason := too_low(client.arena.nbytes)):
            raise ConfigError(f"the arena of the KV store cannot be given to the device: {reason}")

    @property
    def copies_aside(self) -> bool:
        """Return whether `write` copies on a side stream, and returns before the copies are done."""
        return self._copies is not None and self._device.type == "cuda"

    @property
    def copies_cheaply(self) -> bool:
        """Return whether rows are copied on a side stream, or by the processor that computes."""
        return self.copies_aside or (self._device.type == "cpu" and not self._client.selects_in_store)

    @property
    def is_settled(self) -> bool:
        """Return whether the device can reach all of the arena that it ever will."""
        return self.view is None or self.view.is_settled

    def map(self) -> None:
        """Take a view of the arena that the client is attached to."""
        if self._is_refused or self._client.transport != "zero_copy":
            return
        allow_locking(self._client.arena.nbytes)
        try:
            self.view = map_arena(self._client, self._num_seats, self._max_model_len, self._device)
        except RegistrationFailed as error:
            self._refuse(error)
            return
        self._copies = LayerCopies(self.view, self._device)

    def _refuse(self, error: RegistrationFailed) -> None:
        reason = too_low(self._client.arena.nbytes)
        logger.warning(
            "rows of the KV store go through the host, which is slower: %s%s",
            error,
            f"; {reason}" if reason else "",
        )
        self._is_refused = True
        self._meter.fallbacks[Fallback.THROUGH_HOST] += 1
        self.close()

    def close(self) -> None:
        """Release the view once the device is done with it; before the client unmaps the arena."""
        if self.view is not None:
            self.view.close()
        self.view = self._copies = None

    def adopt(self, seat: int, slabs: npt.NDArray[np.int32], layer_begin: int = 0) -> None:
        """See `ArenaView.adopt`; the view is dropped if CUDA does not register the memory."""
        if self.view is None:
            return
        try:
            self.view.adopt(seat, slabs, layer_begin)
        except RegistrationFailed as error:
            self._refuse(error)

    def forget(self, seat: int) -> None:
        """Remove a seat's slabs, which nothing on the device writes to any more."""
        if self.view is not None:
            self.view.forget(seat)

    def write(self, rows: Tensor, slabs: npt.NDArray[np.int32]) -> Mark | None:
        """See `LayerCopies.write`; None where the host must write."""
        return self._copies.write(rows, slabs) if self._copies and self.copies_aside else None

    def read(self, slabs: npt.NDArray[np.int32], rows: Tensor, free: Mark | None) -> Mark | None:
        """See `LayerCopies.read`; None where the host must read."""
        return self._copies.read(slabs, rows, free) if self._copies else None

    def wait_for_writes(self) -> None:
        """Let the host wait until `write` has written everything."""
        if self._copies is not None:
            self._copies.wait_for_writes()

    def wait(self) -> None:
        """Let the host wait for the rows that decode steps write."""
        if self.view is not None:
            Mark(self._device).wait()
