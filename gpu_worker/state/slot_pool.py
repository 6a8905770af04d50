"""The pool of slots. Everything that is attended is here; a slot holds one K|V row of one (layer, KV head)."""

from __future__ import annotations

from itertools import accumulate
from operator import le

import torch
from torch import Tensor

from gpu_worker.device import to_device
from gpu_worker.errors import CapacityError
from gpu_worker.kernels.attention.reference import BLOCK_SIZE


class SlotPool:
    """Blocks of 64 slots and the list of free ones.

    rows: [num_blocks * 64, 2d], K then V. Freed blocks keep their bytes: readers go by lengths, never by content.
    """

    def __init__(self, num_blocks: int, row_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.rows = torch.empty(num_blocks * BLOCK_SIZE, row_elements, dtype=dtype, device=device)
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def row_bytes(self) -> int:
        return self.rows.shape[1] * self.rows.element_size()

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_slots(self) -> int:
        return (self.num_blocks - len(self._free)) * BLOCK_SIZE

    def allocate(self, num_blocks: int) -> list[int]:
        """Block ids, ascending runs where possible. Raises CapacityError that says how many blocks are missing."""
        if num_blocks > len(self._free):
            missing = (num_blocks - len(self._free)) * BLOCK_SIZE * self.row_bytes
            raise CapacityError(f"{missing} bytes of slots are missing; give more with --slot-memory")
        return [self._free.pop() for _ in range(num_blocks)]

    def free(self, block_ids: list[int]) -> None:
        self._free.extend(reversed(block_ids))


class BlockTables:
    """Which blocks hold the slots of each (sequence, layer, KV head): a seat's logical slot i lies in block i // 64.

    tables: int64 [seats, L, H_kv, max_blocks].
    """

    def __init__(
        self, pool: SlotPool, num_seats: int, num_layers: int, num_kv_heads: int, max_slots: int
    ) -> None:
        self._pool = pool
        max_blocks = -(-max_slots // BLOCK_SIZE)
        shape = (num_seats, num_layers, num_kv_heads, max_blocks)
        self.tables = torch.empty(shape, dtype=torch.int64, device=pool.rows.device)
        self._held: dict[tuple[int, int], list[int]] = {}
        self._dealt: dict[tuple[int, int], list[int]] = {}

    def assign(self, seat: int, layer: int, num_slots: int) -> None:
        """Give every KV head of a layer room for `num_slots` slots. Raises CapacityError."""
        num_blocks = -(-num_slots // BLOCK_SIZE)
        num_kv_heads = self.tables.shape[2]
        blocks = self._pool.allocate(num_blocks * num_kv_heads)
        self._held[seat, layer] = blocks
        held = to_device(blocks, self.tables.device)
        self.tables[seat, layer, :, :num_blocks] = held.view(num_kv_heads, num_blocks)

    def reserve(self, seat: int, layer: int, num_blocks: int) -> None:
        """Reserve so many blocks for a layer, to be divided among its heads later. Raises CapacityError."""
        self._held[seat, layer] = self._pool.allocate(num_blocks)

    def deal(self, seat: int, layer: int, num_blocks: list[int], frees_rest: bool = True) -> None:
        """Give each KV head so many of the layer's reserved blocks, and free the rest, or keep it to divide it again.
        In the latter case heads that all have as many already keep them, and nothing is sent to the device."""
        held, num_dealt, most = self._held[seat, layer], sum(num_blocks), max(num_blocks)
        assert num_dealt <= len(held), f"{num_dealt} blocks dealt of {len(held)}"
        before = self._dealt.get((seat, layer))
        if before is not None and not frees_rest and all(map(le, num_blocks, before)):
            return
        self._dealt[seat, layer] = num_blocks
        ends = accumulate(num_blocks)
        heads = [held[end - count : end] for count, end in zip(num_blocks, ends, strict=True)]
        # What pads a head's is never read.
        padded = [blocks + [0] * (most - len(blocks)) for blocks in heads]
        self.tables[seat, layer, :, :most] = to_device(padded, self.tables.device)
        if frees_rest:
            self._pool.free(held[num_dealt:])
            self._held[seat, layer] = held[:num_dealt]

    def shrink(self, seat: int, layer: int, num_slots: int) -> None:
        """Leave every KV head the blocks of its first `num_slots` slots; the others are free."""
        held, num_kv_heads = self._held[seat, layer], self.tables.shape[2]
        per_head, num_kept = len(held) // num_kv_heads, -(-num_slots // BLOCK_SIZE)
        heads = [held[first : first + per_head] for first in range(0, len(held), per_head)]
        self._held[seat, layer] = [block for blocks in heads for block in blocks[:num_kept]]
        self._pool.free([block for blocks in heads for block in blocks[num_kept:]])

    def num_held(self, seat: int) -> int:
        """Blocks that a seat holds in all layers; 0 for none."""
        return sum(len(blocks) for (holder, _), blocks in self._held.items() if holder == seat)

    def held_bytes(self, seat: int) -> int:
        """Of the slots that a seat holds in all layers; 0 for none."""
        return self.num_held(seat) * BLOCK_SIZE * self._pool.row_bytes

    def extend(self, seat: int, layer: int, num_slots: int) -> None:
        """Give every KV head of a layer blocks for `num_slots` slots, with those that it has. Raises CapacityError."""
        held, num_kv_heads = self._held[seat, layer], self.tables.shape[2]
        per_head, wanted = len(held) // num_kv_heads, num_blocks(num_slots)
        added = self._pool.allocate((wanted - per_head) * num_kv_heads)
        more = wanted - per_head
        heads = [
            held[head * per_head : (head + 1) * per_head] + added[head * more : (head + 1) * more]
            for head in range(num_kv_heads)
        ]
        self._held[seat, layer] = [block for blocks in heads for block in blocks]
        self.tables[seat, layer, :, :wanted] = to_device(heads, self.tables.device)

    def release(self, seat: int, layer: int) -> None:
        """Free what `assign` or `reserve` gave; nothing where they gave nothing."""
        self._dealt.pop((seat, layer), None)
        self._pool.free(self._held.pop((seat, layer), []))


def physical_slots(tables: Tensor, slots: Tensor) -> Tensor:
    """Pool rows of logical slots. tables: int64 [..., max_blocks]; slots: int64 [..., A], -1 stays -1."""
    blocks = tables.gather(-1, slots.clamp(min=0) // BLOCK_SIZE)
    return (blocks * BLOCK_SIZE + slots % BLOCK_SIZE).masked_fill(slots < 0, -1)


def num_blocks(num_slots: int) -> int:
    """Blocks that hold so many slots."""
    return -(-num_slots // BLOCK_SIZE)


def blocks_of_heads(num_heads: int, num_slots: int) -> int:
    """Blocks that hold `num_slots` slots a head, the mean, however unequally the heads share them."""
    return num_heads * (num_slots + BLOCK_SIZE - 1) // BLOCK_SIZE
