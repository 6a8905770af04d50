"""The pool of slots. Everything that is attended is here; a slot holds one K|V row of one (layer, KV head)."""

from __future__ import annotations

import math
from itertools import accumulate
from operator import le

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import to_device
from gpu_worker.errors import CapacityError
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.row_format import empty_rows
from kv_store.client import RowFormat

BlockIds = npt.NDArray[np.int64]


class SlotPool:
    """Blocks of 64 slots and the queue of free ones: what was freed last is taken last, and keeps its rows longest.

    rows: [num_blocks * 64, row_elements]. Freed blocks keep their bytes: readers go by lengths, never by content.
    num_allocations: so many there were; `taken_at` says in which of them each block was taken last, 0 for never.
    """

    def __init__(self, num_blocks: int, row_format: RowFormat, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.row_format = row_format
        self.rows = empty_rows(row_format, num_blocks * BLOCK_SIZE, device=device)
        # A prompt of 128K takes half a million: they are moved in arrays. From `_first` on `num_free_blocks` are free,
        # around the end.
        self._free: BlockIds = np.arange(num_blocks)
        self._first = 0
        self.num_free_blocks = num_blocks
        self.num_allocations = 0
        self.taken_at: BlockIds = np.zeros(num_blocks, np.int64)

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.row_format)

    @property
    def num_used_slots(self) -> int:
        return (self.num_blocks - self.num_free_blocks) * BLOCK_SIZE

    def allocate(self, num_blocks: int) -> BlockIds:
        """Block ids [num_blocks], those that are free the longest. Raises CapacityError that says how many bytes are
        missing."""
        left = self.num_free_blocks - num_blocks
        if left < 0:
            missing = -left * self.block_bytes
            raise CapacityError(f"{missing} bytes of slots are missing; give more with --slot-memory")
        taken = np.concatenate([self._free[places] for places in self._queue(0, num_blocks)])
        self._first = (self._first + num_blocks) % max(1, self.num_blocks)
        self.num_free_blocks = left
        self.num_allocations += 1
        self.taken_at[taken] = self.num_allocations
        return taken

    def free(self, block_ids: BlockIds) -> None:
        """Free blocks; their ids may have any shape."""
        freed = block_ids.ravel()
        first, rest = self._queue(self.num_free_blocks, freed.size)
        self._free[first] = freed[: first.stop - first.start]
        self._free[rest] = freed[first.stop - first.start :]
        self.num_free_blocks += freed.size

    def _queue(self, begin: int, number: int) -> tuple[slice, slice]:
        """The places of so many, from the `begin`-th in the queue on: up to the end, and from the beginning on."""
        begin = (self._first + begin) % max(1, self.num_blocks)
        end = begin + number
        return slice(begin, min(end, self.num_blocks)), slice(0, max(0, end - self.num_blocks))


class BlockTables:
    """The blocks that hold the slots of each (sequence, layer, KV head), of the layers of one cache: a seat's logical
    slot i lies in block i // 64.

    tables: int64 [seats, L, H_kv, max_blocks].
    """

    def __init__(
        self, pool: SlotPool, num_seats: int, num_layers: int, num_kv_heads: int, max_slots: int
    ) -> None:
        self._pool = pool
        max_blocks = -(-max_slots // BLOCK_SIZE)
        shape = (num_seats, num_layers, num_kv_heads, max_blocks)
        self.tables = torch.empty(shape, dtype=torch.int64, device=pool.rows.device)
        # By seat and layer: [H_kv, blocks of a head], or [blocks] where they were reserved.
        self._held: dict[tuple[int, int], BlockIds] = {}
        self._dealt: dict[tuple[int, int], list[int]] = {}

    def assign(self, seat: int, num_slots: int) -> None:
        """Give `num_slots` slots to every KV head of every layer. Raises CapacityError."""
        shape = self._num_layers, self._num_kv_heads, num_blocks(num_slots)
        self._hold(seat, self._pool.allocate(math.prod(shape)).reshape(shape))

    def reserve(self, seat: int, layer: int, num_blocks: int) -> None:
        """Reserve so many blocks for a layer, to be divided among its heads later. Raises CapacityError."""
        self._held[seat, layer] = self._pool.allocate(num_blocks)

    def deal_evenly(self, seat: int, num_blocks: list[int]) -> None:
        """Give each KV head of every layer so many of the layer's reserved blocks, and keep the rest, to divide all
        again: in one copy to the device, where `deal` makes one for each layer that is divided otherwise."""
        num_heads, most = self._num_kv_heads, max(num_blocks)
        # What pads a head's is never read.
        heads = np.zeros((self._num_layers, num_heads, most), dtype=np.int64)
        for layer, (of_layer, count) in enumerate(zip(heads, num_blocks, strict=True)):
            of_layer[:, :count] = self._held[seat, layer][: num_heads * count].reshape(num_heads, count)
            self._dealt[seat, layer] = [count] * num_heads
        self.tables[seat, :, :, :most] = to_device(heads, self.tables.device)

    def deal(self, seat: int, layer: int, num_blocks: list[int], frees_rest: bool = True) -> None:
        """Give each KV head so many of the layer's reserved blocks, and free the rest, or keep it to divide it again.
        Where heads have as many already, or in the latter case more, nothing is sent to the device."""
        held, num_dealt = self._held[seat, layer], sum(num_blocks)
        assert num_dealt <= len(held), f"{num_dealt} blocks dealt of {len(held)}"
        before = self._dealt.get((seat, layer))
        if before is not None and not frees_rest and all(map(le, num_blocks, before)):
            return
        if before != num_blocks:
            self._divide(seat, layer, num_blocks)
        if frees_rest:
            self._pool.free(held[num_dealt:])
            self._held[seat, layer] = held[:num_dealt]

    def _divide(self, seat: int, layer: int, num_blocks: list[int]) -> None:
        held, most = self._held[seat, layer], max(num_blocks)
        self._dealt[seat, layer] = num_blocks
        # What pads a head's is never read.
        heads = np.zeros((len(num_blocks), most), dtype=np.int64)
        for head, (count, end) in enumerate(zip(num_blocks, accumulate(num_blocks), strict=True)):
            heads[head, :count] = held[end - count : end]
        self.tables[seat, layer, :, :most] = to_device(heads, self.tables.device)

    def shrink(self, seat: int, num_slots: int) -> None:
        """Leave every KV head the blocks of its first `num_slots` slots; the others are free."""
        num_kept = num_blocks(num_slots)
        for layer in range(self._num_layers):
            held = self._held[seat, layer]
            self._held[seat, layer] = held[:, :num_kept].copy()
            self._pool.free(held[:, num_kept:])

    def blocks_of(self, seat: int, layer: int, num_blocks: int) -> BlockIds:
        """The first blocks of each KV head of a layer to which `assign` gave some: [H_kv, num_blocks]."""
        return self._held[seat, layer][:, :num_blocks]

    def num_held(self, seat: int) -> int:
        """Blocks that a seat holds in all layers; 0 for none."""
        return sum(blocks.size for (holder, _), blocks in self._held.items() if holder == seat)

    def held_bytes(self, seat: int) -> int:
        """Return the bytes of the slots that a seat holds in all layers; 0 for none."""
        return self.num_held(seat) * self._pool.block_bytes

    def extend(self, seat: int, num_slots: int) -> None:
        """Give every KV head blocks for `num_slots` slots, with those that it has, which are as many in all layers.
        Raises CapacityError."""
        begin, end = self._held[seat, 0].shape[1], num_blocks(num_slots)
        shape = self._num_layers, self._num_kv_heads, end - begin
        added = self._pool.allocate(math.prod(shape)).reshape(shape)
        for layer, more in enumerate(added):
            self._held[seat, layer] = np.concatenate([self._held[seat, layer], more], axis=1)
        self.tables[seat, :, :, begin:end] = to_device(added, self.tables.device)

    def release(self, seat: int) -> None:
        """Free what `assign` or `reserve` gave; nothing where they gave nothing."""
        for layer in range(self._num_layers):
            self._dealt.pop((seat, layer), None)
            if (held := self._held.pop((seat, layer), None)) is not None:
                self._pool.free(held)

    @property
    def _num_layers(self) -> int:
        return self.tables.shape[1]

    @property
    def _num_kv_heads(self) -> int:
        return self.tables.shape[2]

    def _hold(self, seat: int, blocks: BlockIds) -> None:
        """blocks: of all layers, [L, H_kv, blocks of a head]."""
        self._held.update({(seat, layer): held for layer, held in enumerate(blocks)})
        held = to_device(blocks, self.tables.device)
        self.tables[seat, :, :, : blocks.shape[2]] = held


def physical_slots(tables: Tensor, slots: Tensor) -> Tensor:
    """Pool rows of logical slots. tables: int64 [..., max_blocks]; slots: int64 [..., A], -1 stays -1."""
    blocks = tables.gather(-1, slots.clamp(min=0) // BLOCK_SIZE)
    return (blocks * BLOCK_SIZE + slots % BLOCK_SIZE).masked_fill(slots < 0, -1)


def block_bytes(row_format: RowFormat) -> int:
    """Bytes of a block's rows."""
    return BLOCK_SIZE * row_format.row_bytes


def num_blocks(num_slots: int) -> int:
    """Blocks that hold so many slots."""
    return -(-num_slots // BLOCK_SIZE)


def blocks_of_heads(num_heads: int, num_slots: int) -> int:
    """Blocks that hold `num_slots` slots a head, the mean, however unequally the heads share them."""
    return num_heads * (num_slots + BLOCK_SIZE - 1) // BLOCK_SIZE
