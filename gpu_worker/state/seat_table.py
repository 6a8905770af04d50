"""Tables by seat, layer and KV head that are as wide as the widest sequence needs."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.policies.base import CacheShape
from gpu_worker.state.seat_memory import SeatMemory, seated_state
from gpu_worker.state.slot_pool import SlotPool


class SeatTable:
    """table: [seats + 1, L, H_kv, width + spare]; another one after it was widened, which voids captured steps.

    A seat's part has memory while the seat is taken, and holds anything at first. The last seat, of padding lanes,
    always has some, and starts `empty`."""

    def __init__(
        self, pool: SlotPool, shape: CacheShape, dtype: torch.dtype, empty: float, spare: int = 0
    ) -> None:
        """empty: what new columns and the padding hold. spare: columns beside those that are asked for."""
        self._pool = pool
        self._shape = shape
        self._dtype = dtype
        self._empty = empty
        self._spare = spare
        self.width = 0
        self.table, self._memory = self._allocate(0)

    def make_room(self, width: int) -> None:
        """Have at least this many columns. Raises CapacityError, and then nothing has changed."""
        if width <= self.width:
            return
        width = 1 << (width - 1).bit_length()
        tensor, memory = self._allocate(width)
        try:
            for seat in self._memory.seats:
                memory.take(seat, 0)
        except BaseException:
            memory.free_all()
            raise
        for seat in self._memory.seats:
            tensor[seat] = self._empty
            tensor[seat, ..., : self.width] = self.table[seat, ..., : self.width]
        self._memory.free_all()
        self.table, self._memory, self.width = tensor, memory, width

    def _allocate(self, width: int) -> tuple[Tensor, SeatMemory]:
        columns = width + self._spare
        tensor, memory = seated_state(
            self._pool, self._shape, lambda shape: shape.seated(columns, dtype=self._dtype)
        )
        memory.keep_padding()
        tensor[memory.padding] = self._empty
        return tensor, memory

    @property
    def seats(self) -> list[int]:
        """The seats that are taken."""
        return self._memory.seats

    def missing_pages(self, seat: int) -> int:
        """Return the pages that a seat lacks."""
        return self._memory.missing_pages(seat, 0)

    def num_held_pages(self, seat: int) -> int:
        return self._memory.num_held_pages(seat)

    def take(self, seat: int) -> None:
        """Have memory for a seat. Raises CapacityError."""
        self._memory.take(seat, 0)

    def free(self, seat: int) -> None:
        """Free a seat's memory; nothing where it has none."""
        self._memory.free(seat)
