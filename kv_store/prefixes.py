"""Sealed slabs by what they hold: a chain of hashes, one for each full slab of all layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_store.errors import InvalidArgument
from kv_store.slabs import SlabAllocator

HASH_BYTES = 32


def check_hashes(hashes: Sequence[bytes]) -> None:
    """Raises InvalidArgument unless every hash has 32 bytes."""
    if any(len(value) != HASH_BYTES for value in hashes):
        raise InvalidArgument(f"a prefix hash must have {HASH_BYTES} bytes")


class PrefixDirectory:
    """Holds one reference to every slab it lists; entries without another holder are evicted, oldest first.

    A hash covers everything before it, so an entry is of use only behind its predecessors. Each use renews the
    chain from its end to its start: a predecessor is never older than what follows it.
    """

    def __init__(self, allocator: SlabAllocator) -> None:
        self._allocator = allocator
        # hash -> slab ids int32 [num_layers]; the least recently used first
        self._entries: OrderedDict[bytes, npt.NDArray[np.int32]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def publish(self, hashes: Sequence[bytes], table: npt.NDArray[np.int32]) -> None:
        """List the first len(hashes) columns of `table` [num_layers, n]; slabs already listed stay as they are."""
        for i, value in enumerate(hashes):
            if value not in self._entries:
                slabs = table[:, i].copy()
                self._allocator.retain(slabs)
                self._entries[value] = slabs
        self._touch(hashes)

    def lookup(self, hashes: Sequence[bytes]) -> list[npt.NDArray[np.int32]]:
        """Slabs [num_layers] of each hash of the longest known prefix."""
        found = []
        for value in hashes:
            slabs = self._entries.get(value)
            if slabs is None:
                break
            found.append(slabs)
        self._touch(hashes[: len(found)])
        return found

    def num_evictable_slabs(self, waived: npt.NDArray[np.int32], enough: int) -> int:
        """Slabs without another holder, counted from the least recently used on until there are enough. waived: int32
        [num_slabs], references of each slab that do not count."""
        references, found = self._allocator.references, 0
        for slabs in self._entries.values():
            if found >= enough:
                break
            if (references(slabs) - waived[slabs]).max() == 1:
                found += slabs.size
        return found

    def evict_one(self) -> bool:
        """Drop the least recently used entry without a lease; False when there is none."""
        for value, slabs in self._entries.items():
            if self._is_unleased(slabs):
                del self._entries[value]
                self._allocator.release(slabs)
                return True
        return False

    def clear(self) -> None:
        """Drop every entry, leased or not; leased slabs live on with their holders."""
        for slabs in self._entries.values():
            self._allocator.release(slabs)
        self._entries.clear()

    def _is_unleased(self, slabs: npt.NDArray[np.int32]) -> bool:
        return bool(self._allocator.references(slabs).max() == 1)

    def _touch(self, hashes: Sequence[bytes]) -> None:
        for value in reversed(hashes):
            self._entries.move_to_end(value)
