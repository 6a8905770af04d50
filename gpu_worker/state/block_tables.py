"""Where the slots of each sequence, layer and KV head lie in the pool."""

from __future__ import annotations

import math
from itertools import accumulate
from operator import le

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device import to_device
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.state.seat_memory import SeatMemory
from gpu_worker.state.slot_pool import BlockIds, SlotPool, num_blocks


class BlockTables:
    """The blocks that hold the slots of each (sequence, layer, KV head), of the layers of one cache: a seat's logical
    slot i lies in block i // 64.

    tables: int64 [seats + 1, L, H_kv, max_blocks], the last seat's for padding.
    """

    def __init__(
        self, pool: SlotPool, num_seats: int, num_layers: int, num_kv_heads: int, max_slots: int
    ) -> None:
        self._pool = pool
        size = num_layers, num_kv_heads, num_blocks(max_slots)
        self.tables, self._memory = SeatMemory.of(
            pool, num_seats, lambda seats: seats.tensor(size, torch.int64, BLOCK_SIZE)
        )
        # By seat and layer: [H_kv, blocks of a head], or [blocks] where they were reserved.
        self._held: dict[tuple[int, int], BlockIds] = {}
        self._dealt: dict[tuple[int, int], list[int]] = {}

    def assign(self, seat: int, num_slots: int) -> None:
        """Give `num_slots` slots to every KV head of every layer. Raises CapacityError."""
        shape = self._num_layers, self._num_kv_heads, num_blocks(num_slots)
        self._memory.take(seat, num_slots)
        self._hold(seat, self._pool.allocate(math.prod(shape)).reshape(shape))

    def reserve(self, seat: int, layer: int, num_blocks: int) -> None:
        """Reserve so many blocks for a layer, to be divided among its heads later. Raises CapacityError."""
        self._memory.take(seat, num_blocks * BLOCK_SIZE)
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

    def missing_pages(self, seat: int, num_slots: int) -> int:
        """Return the pages that a seat's tables lack for so many slots of a head; -1: a seat without any."""
        return self._memory.missing_pages(seat, num_slots)

    def num_held_pages(self, seat: int) -> int:
        return self._memory.num_held_pages(seat)

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
        self._memory.take(seat, num_slots)
        shape = self._num_layers, self._num_kv_heads, end - begin
        added = self._pool.allocate(math.prod(shape)).reshape(shape)
        for layer, more in enumerate(added):
            self._held[seat, layer] = np.concatenate([self._held[seat, layer], more], axis=1)
        self.tables[seat, :, :, begin:end] = to_device(added, self.tables.device)

    def release(self, seat: int) -> None:
        """Free what `assign` or `reserve` gave; nothing where they gave nothing."""
        self._memory.free(seat)
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
