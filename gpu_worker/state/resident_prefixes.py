"""Rows of known prompts that still lie in slots: of running sequences, or free ones until they are reused."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gpu_worker.device import to_device
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.rows import load_prompt, store_prompt
from gpu_worker.state.slot_pool import BlockIds, SlotPool


@dataclass(frozen=True, slots=True)
class _Slab:
    """blocks: [L, H_kv, blocks of a slab]. since: [L], after so many allocations of the pool a layer's were noted."""

    blocks: BlockIds
    since: BlockIds


class Resident:
    """A known prefix in slots, which any sequence may hold, or none."""

    def __init__(self, pool: SlotPool, blocks: BlockIds, since: BlockIds) -> None:
        """blocks: [L, H_kv, B]. since: [L, B], the pool's allocations after which they hold it unless taken again."""
        self._pool = pool
        self._blocks = blocks
        self._since = since
        self._on_device: Tensor | None = None

    def is_there(self, layer: int) -> bool:
        """Return whether a layer's slots still hold the prefix: none was taken since."""
        return bool((self._pool.taken_at[self._blocks[layer]] <= self._since[layer]).all())

    def load(self, layer: int, rows: Tensor) -> bool:
        """Queue filling rows [H_kv, n, 2d] with the prefix; False where it is gone. Later writes to the slots are
        queued behind this."""
        if not self.is_there(layer):
            return False
        if self._on_device is None:
            self._on_device = to_device(self._blocks, rows.device)
        load_prompt(rows, self._pool.rows, self._on_device[layer])
        return True


class ResidentPrefixes:
    """An index from the names of prompts' slabs to the slots with their rows. Holds no slot: those of prompts that
    ended are free, and what was freed last is taken last. A name covers all that decides the rows: any request that may
    know it may read them."""

    def __init__(self, pool: SlotPool, tokens_per_slab: int, num_layers: int, num_kv_heads: int) -> None:
        """tokens_per_slab: that each name stands for; 0: nothing is found."""
        self._pool = pool
        self.num_layers, self._num_kv_heads = num_layers, num_kv_heads
        # Blocks of a head; slabs that do not fill whole ones are not found.
        self._width = 0 if tokens_per_slab % BLOCK_SIZE else tokens_per_slab // BLOCK_SIZE
        self._most = pool.num_blocks // (num_layers * num_kv_heads * self._width) if self._width else 0
        self._slabs: OrderedDict[bytes, _Slab] = OrderedDict()

    def num_blocks(self, names: tuple[bytes, ...]) -> int:
        """Return the blocks of each head that hold the slabs of these names; 0 where slabs are not found again."""
        return len(names) * self._width if self._most else 0

    def keep(self, names: tuple[bytes, ...], blocks: BlockIds, since: BlockIds | None = None) -> None:
        """Note where slabs lie. They are not overwritten before their slots are free and taken again.

        blocks: [L, H_kv, `num_blocks`].
        since: [L], the pool's allocations by which each layer's were taken; None: by now.
        """
        if since is None:
            since = np.full(self.num_layers, self._pool.num_allocations)
        for index, name in enumerate(names):
            # A copy: the whole of it would stay for as long as one slab is known.
            own = blocks[:, :, index * self._width : (index + 1) * self._width].copy()
            self._slabs[name] = _Slab(own, since)
            self._slabs.move_to_end(name)
        while len(self._slabs) > self._most:
            self._slabs.popitem(last=False)

    def find(self, names: tuple[bytes, ...]) -> Resident | None:
        """Return the slabs of all these names; None where one is not known, or gone from the first layer. Slots of that
        layer are the first to go."""
        slabs = [slab for name in names if (slab := self._slabs.get(name)) is not None]
        if not slabs or len(slabs) < len(names):
            return None
        for name in names:
            self._slabs.move_to_end(name)
        blocks = np.concatenate([slab.blocks for slab in slabs], axis=2)
        since = np.stack([slab.since for slab in slabs], axis=1).repeat(self._width, axis=1)
        resident = Resident(self._pool, blocks, since)
        return resident if resident.is_there(0) else None

    def leave(self, names: tuple[bytes, ...], num_known: int) -> LeftRows | None:
        """Let a prompt that gets too few slots for all rows leave its slabs in free slots. The first `num_known` lie
        there already. None where there are no others, or too few free slots."""
        num_blocks = self.num_layers * self._num_kv_heads * self.num_blocks(names[num_known:])
        return LeftRows(self, names, num_known) if 0 < num_blocks <= self._pool.num_free_blocks else None

    def put(self, rows: Tensor) -> tuple[BlockIds, int] | None:
        """Queue copying slabs of some layers' rows [L, H_kv, n, 2d] to free slots, which stay free; returns the blocks
        [L, H_kv, B], and the pool's allocations by now. None where too few are free."""
        num_layers, num_heads, num_tokens = rows.shape[:3]
        shape = num_layers, num_heads, num_tokens // BLOCK_SIZE
        if math.prod(shape) > self._pool.num_free_blocks:
            return None
        blocks = self._pool.allocate(math.prod(shape)).reshape(shape)
        # Later writes to the slots are queued behind this.
        store_prompt(rows, self._pool.rows, to_device(blocks[None], rows.device), 0, 0)
        self._pool.free(blocks)
        return blocks, self._pool.num_allocations

    def span(self, slabs: range) -> range:
        """The positions of some slabs' tokens."""
        return range(*(self._width * BLOCK_SIZE * number for number in (slabs.start, slabs.stop)))


class LeftRows:
    """A prompt's slabs that are left in free slots while it is computed, one layer after the other."""

    def __init__(self, residents: ResidentPrefixes, names: tuple[bytes, ...], num_known: int) -> None:
        self._residents = residents
        self._names = names[num_known:]
        self._span = residents.span(range(num_known, len(names)))
        self._blocks: list[BlockIds] = []
        self._since: list[int] = []

    @property
    def begin(self) -> int:
        """The position of the first token that is left."""
        return self._span.start

    def put(self, layers: range, rows: Tensor, begin: int = 0) -> None:
        """The next layers', [L, H_kv, n, 2d] from the position `begin` on, unless slots are missing."""
        some = rows[:, :, self._span.start - begin : self._span.stop - begin]
        if len(self._since) == layers.start and (left := self._residents.put(some)) is not None:
            blocks, now = left
            self._blocks.append(blocks)
            self._since += [now] * len(layers)

    def publish(self) -> None:
        """Let others find them, where no layer is missing: once what they follow on is proven."""
        if len(self._since) == self._residents.num_layers:
            self._residents.keep(self._names, np.concatenate(self._blocks), np.array(self._since))
