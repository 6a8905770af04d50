"""State that a sequence has while it sits: addresses for every seat, and memory for those that are taken.

Kernels and captured steps see plain tensors [seats, ...]. A seat's part of them has pages of the slot pool behind it
from `take` to `free`, for as many tokens as were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.memory.base import Addresses, PageIds
from gpu_worker.policies.base import CacheShape, SeatTensors
from gpu_worker.state.slot_pool import SlotPool

# Between two tensors of a seat, so that kernels find every one aligned.
ALIGNMENT = 512
NO_PAGES = np.empty(0, np.int64)
NONE_USED = np.empty(0, np.bool_)
# Numbers of tokens whose pages are known.
MAX_KNOWN = 256
# Behind a place that was never backed.
NOTHING = -2

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor's bytes in those of a seat: `num_rows` rows, one behind the other, of places of `tokens_each` tokens, of
    which a sequence uses the first; 0: it uses all."""

    begin: int
    num_rows: int
    row_bytes: int
    place_bytes: int
    tokens_each: int

    @property
    def end(self) -> int:
        return self.begin + self.num_rows * self.row_bytes

    def mark(self, is_used: npt.NDArray[np.bool_], num_tokens: int, page_bytes: int) -> None:
        """Mark the pages that so many tokens use."""
        used = self.row_bytes
        if self.tokens_each:
            used = min(used, -(-num_tokens // self.tokens_each) * self.place_bytes)
        if used == 0:
            return
        begins = self.begin + np.arange(self.num_rows) * self.row_bytes
        steps = np.zeros(is_used.size + 1, np.int64)
        np.add.at(steps, begins // page_bytes, 1)
        np.add.at(steps, (begins + used - 1) // page_bytes + 1, -1)
        is_used |= np.cumsum(steps[:-1]) > 0


class SeatLayout:
    """Where the tensors of a seat lie, one behind the other."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []

    @property
    def num_bytes(self) -> int:
        return self.parts[-1].end if self.parts else 0

    def add(self, size: tuple[int, ...], dtype: torch.dtype, tokens_each: int) -> _Part:
        """size: of one seat, [layers, KV heads, ...]."""
        row_bytes = dtype.itemsize * int(np.prod(size[2:]))
        begin = -(-self.num_bytes // ALIGNMENT) * ALIGNMENT
        place_bytes = row_bytes // size[2] if tokens_each and size[2] else row_bytes
        self.parts.append(_Part(begin, size[0] * size[1], row_bytes, place_bytes, tokens_each))
        return self.parts[-1]

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def tensor(self, size: tuple[int, ...], dtype: torch.dtype, tokens_each: int) -> Tensor:
        """As `SeatMemory` has it, without memory."""
        self.add(size, dtype, tokens_each)
        return torch.empty((1, *size), dtype=dtype, device="meta")


class SeatMemory:
    """The memory of some state of every seat.

    The last seat of its tensors, `padding`, is nobody's: padding lanes read and write it, and find nothing there.
    """

    def __init__(self, pool: SlotPool, num_seats: int, layout: SeatLayout) -> None:
        self.padding = num_seats
        self.device = pool.rows.device
        self._pool = pool
        self._layout = layout
        self._next = SeatLayout()
        # By seat: the page of each place, -1 for none, and spare ones of whole units.
        self._held: dict[int, PageIds] = {}
        self._spare: dict[int, PageIds] = {}
        # What is behind the places of seats that were ever taken, and when they were freed.
        self._behind: dict[int, PageIds] = {}
        self._freed: dict[int, Mark] = {}
        # By numbers of tokens.
        self._used: dict[int, npt.NDArray[np.bool_]] = {}
        self._addresses: Addresses | None = None
        self._pages_each = self._seat_bytes = 0
        if pool.pages is not None and layout.num_bytes:
            self._pages_each = -(-layout.num_bytes // pool.pages.page_bytes)
            self._seat_bytes = self._pages_each * pool.pages.page_bytes
            self._addresses = pool.pages.reserve((num_seats + 1) * self._pages_each)
            # Kernels are launched with the address of the first seat, which the driver must know.
            for seat in (0, self.padding):
                self._put(seat, np.full(self._pages_each, -1))

    def keep_padding(self) -> None:
        """Have memory for the padding seat that keeps what is written, beside the pool's. Raises CapacityError."""
        if self._addresses is not None:
            self._addresses.back_alone(self.padding * self._pages_each, self._pages_each)

    @classmethod
    def of(
        cls, pool: SlotPool, num_seats: int, allocate: Callable[[SeatTensors], StateT]
    ) -> tuple[StateT, SeatMemory]:
        """Return what `allocate` makes of such tensors, and their memory."""
        layout = SeatLayout()
        allocate(layout)
        memory = cls(pool, num_seats, layout)
        return allocate(memory), memory

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages that a seat takes for so many tokens."""
        return int(np.count_nonzero(self._uses(num_tokens)))

    def tensor(self, size: tuple[int, ...], dtype: torch.dtype, tokens_each: int) -> Tensor:
        """Return the next tensor of the layout."""
        num_seats = self.padding + 1
        if self._addresses is None:
            return torch.empty((num_seats, *size), dtype=dtype, device=self.device)
        begin = self._next.add(size, dtype, tokens_each).begin // dtype.itemsize
        strides = torch.empty((1, *size), dtype=dtype, device="meta").stride()[1:]
        every = self._addresses.bytes.view(dtype)
        return every.as_strided((num_seats, *size), (self._seat_bytes // dtype.itemsize, *strides), begin)

    @property
    def seats(self) -> list[int]:
        """The seats that are taken."""
        return list(self._held)

    def missing_pages(self, seat: int, num_tokens: int) -> int:
        """Return how many pages a seat, -1 for none yet, lacks for so many tokens."""
        is_missing, spare = self._uses(num_tokens), 0
        if (held := self._held.get(seat)) is not None:
            is_missing, spare = is_missing & (held < 0), self._spare[seat].size
        return max(0, int(np.count_nonzero(is_missing)) - spare)

    def num_held_pages(self, seat: int) -> int:
        held = self._held.get(seat)
        return 0 if held is None else int(np.count_nonzero(held >= 0)) + self._spare[seat].size

    def take(self, seat: int, num_tokens: int) -> None:
        """Have memory for so many tokens of a seat, with what it has. Raises CapacityError."""
        missing = self.missing_pages(seat, num_tokens)
        new = self._pool.allocate_pages(missing) if missing else NO_PAGES
        freed = self._freed.pop(seat, None)
        if seat not in self._held:
            self._held[seat], self._spare[seat] = np.full(self._pages_each, -1), NO_PAGES
        held = self._held[seat]
        places = np.flatnonzero(self._uses(num_tokens) & (held < 0))
        pages = np.concatenate([self._spare[seat], new])
        held[places], self._spare[seat] = pages[: places.size], pages[places.size :]
        self._put(seat, held, freed)

    def _put(self, seat: int, pages: PageIds, freed: Mark | None = None) -> None:
        """Have these behind the seat's places; behind the others what nobody keeps anything in. freed: until then the
        device may come to what is there; None: until now."""
        if self._addresses is None:
            return
        behind = self._behind.setdefault(seat, np.full(self._pages_each, NOTHING))
        places = np.flatnonzero(behind != pages)
        if (behind[places] != NOTHING).any():
            (freed or Mark(self.device)).wait()
        for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
            if run.size:
                self._addresses.back(seat * self._pages_each + int(run[0]), pages[run])
        behind[:] = pages

    def _uses(self, num_tokens: int) -> npt.NDArray[np.bool_]:
        """Which of a seat's pages so many tokens use; only read. Asked of waiting sequences at every step."""
        if (pages := self._pool.pages) is None:
            return NONE_USED
        if num_tokens not in self._used:
            if len(self._used) >= MAX_KNOWN:
                self._used.clear()
            self._used[num_tokens] = used_pages(self._layout, num_tokens, pages.page_bytes)
        return self._used[num_tokens]

    def free(self, seat: int) -> None:
        """Free a seat's memory; nothing where it has none. The device may still come to what was queued on it."""
        if (held := self._held.pop(seat, None)) is None:
            return
        pages = np.concatenate([held[held >= 0], self._spare.pop(seat)])
        if pages.size:
            self._pool.free_pages(np.sort(pages))
        self._freed[seat] = Mark(self.device)

    def free_all(self) -> None:
        """Free the memory of every seat."""
        for seat in list(self._held):
            self.free(seat)


def seated_state(
    pool: SlotPool, shape: CacheShape, allocate: Callable[[CacheShape], StateT]
) -> tuple[StateT, SeatMemory]:
    """Return what `allocate` makes of the shape, and the memory of what is seated there."""
    return SeatMemory.of(
        pool,
        shape.max_num_seqs,
        lambda seats: allocate(replace(shape, seats=seats, device=seats.device)),
    )


def seat_layout(shape: CacheShape, allocate: Callable[[CacheShape], object]) -> SeatLayout:
    """Return where what `allocate` makes of the shape lies in a seat's memory."""
    layout = SeatLayout()
    allocate(replace(shape, seats=layout, device=layout.device))
    return layout


def used_pages(layout: SeatLayout, num_tokens: int, page_bytes: int) -> npt.NDArray[np.bool_]:
    """Which of a seat's pages so many tokens use."""
    is_used = np.zeros(-(-layout.num_bytes // page_bytes), np.bool_)
    for part in layout.parts:
        part.mark(is_used, num_tokens, page_bytes)
    return is_used
