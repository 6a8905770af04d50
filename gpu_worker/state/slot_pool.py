"""The pool of slots. Everything that is attended is here; a slot holds one K|V row of one (layer, KV head)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.errors import CapacityError
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.memory.base import PageIds, Pages
from gpu_worker.row_format import empty_rows, row_dtype
from kv_store.client import RowFormat

BlockIds = npt.NDArray[np.int64]


class SlotPool:
    """Blocks of 64 slots, and the queue of free ones: what was freed last is taken last, and keeps its rows longest.

    Where there are `pages`, the pool is all of them, and what else requests need is taken as whole pages out of it: the
    blocks of a page are free, or hold rows, or the page is behind other addresses. Blocks of pages that are partly
    taken are taken first.

    rows: [num_blocks * 64, row_elements]. Freed blocks keep their bytes: readers go by lengths, never by content.
    num_allocations: so many there were; `taken_at` says in which of them each block was taken last, 0 for never.
    """

    def __init__(
        self, num_blocks: int, row_format: RowFormat, device: torch.device, pages: Pages | None = None
    ) -> None:
        """pages: of at least so many blocks' bytes; None: only slots are counted."""
        self.row_format = row_format
        self.pages = pages
        # Blocks that are taken and freed as a whole where pages are, and the pages of these.
        self._unit, self.unit_pages = 1, 0
        if pages is not None:
            unit_bytes = math.lcm(pages.page_bytes, self.block_bytes)
            self._unit, self.unit_pages = unit_bytes // self.block_bytes, unit_bytes // pages.page_bytes
            num_blocks = num_blocks // self._unit * self._unit
        self.num_blocks = num_blocks
        self.rows = self._rows(device)
        num_units = num_blocks // self._unit
        # A prompt of 128K takes half a million blocks: they are moved in arrays. From `_first` on `_num_whole` units
        # are free, around the end.
        self._free: BlockIds = np.arange(num_units)
        self._first = 0
        self._num_whole = num_units
        # Of units that are partly taken: which blocks are free, and how many, in the order in which they came to be so.
        self._is_free = np.zeros(num_blocks, np.bool_)
        self._partly: dict[int, int] = {}
        self.num_free_blocks = num_blocks
        self.num_allocations = 0
        self.taken_at: BlockIds = np.zeros(num_blocks, np.int64)

    def _rows(self, device: torch.device) -> Tensor:
        num_slots = self.num_blocks * BLOCK_SIZE
        if self.pages is None:
            return empty_rows(self.row_format, num_slots, device=device)
        used = self.pages.bytes[: num_slots * self.row_format.row_bytes]
        return used.view(row_dtype(self.row_format)).view(num_slots, -1)

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.row_format)

    @property
    def num_used_slots(self) -> int:
        """Slots of the blocks that are not free, those of pages that hold something else included."""
        return (self.num_blocks - self.num_free_blocks) * BLOCK_SIZE

    def blocks_of_pages(self, num_pages: int) -> int:
        """Return the blocks in place of which there are so many pages; 0 where pages are not counted."""
        return -(-num_pages // self.unit_pages) * self._unit if self.unit_pages else 0

    def pages_of(self, num_bytes: int) -> int:
        """Return the pages that hold so many bytes; 0 where pages are not counted."""
        return 0 if self.pages is None else -(-num_bytes // self.pages.page_bytes)

    def has_pages(self, num_pages: int) -> bool:
        """Return whether so many pages are free as a whole."""
        return self.blocks_of_pages(num_pages) <= self._num_whole * self._unit

    def allocate(self, num_blocks: int) -> BlockIds:
        """Block ids [num_blocks], those that are free the longest. Raises CapacityError that says how many bytes are
        missing."""
        self._check(num_blocks, self.num_free_blocks)
        parts, missing = [], num_blocks
        while missing and self._partly:
            parts.append(self._take_partly(next(iter(self._partly)), missing))
            missing -= parts[-1].size
        num_units = -(-missing // self._unit)
        blocks = self._blocks_of(self._take_units(num_units))
        if left := blocks.size - missing:
            self._is_free[blocks[missing:]] = True
            self._partly[int(blocks[-1]) // self._unit] = left
        taken = np.concatenate([*parts, blocks[:missing]])
        self.num_free_blocks -= num_blocks
        self._note_taken(taken)
        return taken

    def _check(self, num_blocks: int, num_free: int) -> None:
        if num_blocks > num_free:
            missing = (num_blocks - num_free) * self.block_bytes
            raise CapacityError(f"{missing} bytes of slots are missing; give more with --slot-memory")

    def _take_partly(self, unit: int, most: int) -> BlockIds:
        begin = unit * self._unit
        blocks = begin + np.flatnonzero(self._is_free[begin : begin + self._unit])[:most]
        self._is_free[blocks] = False
        self._partly[unit] -= blocks.size
        if not self._partly[unit]:
            del self._partly[unit]
        return blocks

    def _take_units(self, number: int) -> BlockIds:
        taken = np.concatenate([self._free[places] for places in self._queue(0, number)])
        self._first = (self._first + number) % max(1, self._free.size)
        self._num_whole -= number
        return taken

    def _blocks_of(self, units: BlockIds) -> BlockIds:
        return (units[:, None] * self._unit + np.arange(self._unit)).ravel()

    def _note_taken(self, blocks: BlockIds) -> None:
        self.num_allocations += 1
        self.taken_at[blocks] = self.num_allocations

    def free(self, block_ids: BlockIds) -> None:
        """Free blocks; their ids may have any shape."""
        freed = block_ids.ravel()
        self.num_free_blocks += freed.size
        if self._unit == 1:
            self._free_units(freed)
            return
        counts = np.bincount(freed // self._unit, minlength=self._free.size)
        units = np.flatnonzero(counts)
        self._is_free[freed] = True
        for unit in units[counts[units] < self._unit].tolist():
            self._partly[unit] = self._partly.get(unit, 0) + int(counts[unit])
            counts[unit] = self._partly[unit]
        whole = units[counts[units] == self._unit]
        for unit in whole.tolist():
            self._partly.pop(unit, None)
        self._is_free[self._blocks_of(whole)] = False
        self._free_units(whole)

    def _free_units(self, units: BlockIds) -> None:
        first, rest = self._queue(self._num_whole, units.size)
        self._free[first] = units[: first.stop - first.start]
        self._free[rest] = units[first.stop - first.start :]
        self._num_whole += units.size

    def _queue(self, begin: int, number: int) -> tuple[slice, slice]:
        """The places of so many, from the `begin`-th in the queue on: up to the end, and from the beginning on."""
        size = self._free.size
        begin = (self._first + begin) % max(1, size)
        end = begin + number
        return slice(begin, min(end, size)), slice(0, max(0, end - size))

    def allocate_pages(self, num_pages: int) -> PageIds:
        """Page ids [at least num_pages], of whole units, whose blocks nobody gets until they are freed. Raises
        CapacityError."""
        number = self.blocks_of_pages(num_pages) // self._unit
        self._check(number * self._unit, self._num_whole * self._unit)
        units = self._take_units(number)
        self.num_free_blocks -= number * self._unit
        self._note_taken(self._blocks_of(units))
        return (units[:, None] * self.unit_pages + np.arange(self.unit_pages)).ravel()

    def free_pages(self, pages: PageIds) -> None:
        """Free what `allocate_pages` gave."""
        units = pages[:: self.unit_pages] // self.unit_pages
        self.num_free_blocks += units.size * self._unit
        self._free_units(units)


def block_bytes(row_format: RowFormat) -> int:
    """Bytes of a block's rows."""
    return BLOCK_SIZE * row_format.row_bytes


def num_blocks(num_slots: int) -> int:
    """Blocks that hold so many slots."""
    return -(-num_slots // BLOCK_SIZE)


def blocks_of_heads(num_heads: int, num_slots: int) -> int:
    """Blocks that hold `num_slots` slots a head, the mean, however unequally the heads share them."""
    return num_heads * (num_slots + BLOCK_SIZE - 1) // BLOCK_SIZE
