"""Sealed slabs by what they hold: a chain of hashes, one for each full slab of all layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from kv_store.errors import InvalidArgument
from kv_store.prefix_ages import PrefixAges
from kv_store.slabs import SlabAllocator

HASH_BYTES = 32


def check_hashes(hashes: Sequence[bytes]) -> None:
    """Raises InvalidArgument unless every hash has 32 bytes."""
    if any(len(value) != HASH_BYTES for value in hashes):
        raise InvalidArgument(f"a prefix hash must have {HASH_BYTES} bytes")


class PrefixDirectory:
    """Holds one reference to every slab it lists; entries without another holder are evicted, oldest first.

    used_at: float64 [num_slabs], when each was listed or looked up last, by the clock.

    A hash covers everything before it, so an entry is of use only behind its predecessors. Each use renews the
    chain from its end to its start: a predecessor is never older than what follows it.
    """

    def __init__(self, allocator: SlabAllocator, clock: Callable[[], float]) -> None:
        self._allocator = allocator
        self._clock = clock
        self.used_at: npt.NDArray[np.float64] = np.zeros(allocator.num_slabs)
        self.ages = PrefixAges(clock)
        # hash -> slab ids int32 [num_layers]; the least recently used first
        self._entries: OrderedDict[bytes, npt.NDArray[np.int32]] = OrderedDict()
        # hash -> the one before it in its chain, which the first of a chain has not
        self._before: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def publish(self, hashes: Sequence[bytes], table: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """List the first len(hashes) columns of `table` [num_layers, n]; slabs already listed stay as they are. Returns
        the slabs that are new here."""
        added = [np.empty(0, np.int32)]
        for i, value in enumerate(hashes):
            if value not in self._entries:
                slabs = table[:, i].copy()
                self._allocator.retain(slabs)
                self._entries[value] = slabs
                added.append(slabs)
                if i:
                    self._before[value] = hashes[i - 1]
        self.ages.note_listed(hashes)
        self._touch(hashes)
        return np.concatenate(added)

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

    def find(self, name: bytes) -> npt.NDArray[np.int32] | None:
        """Slabs [num_layers] of one hash, the same array for as long as it is listed; None where it is not."""
        return self._entries.get(name)

    def num_evictable_slabs(self, waived: npt.NDArray[np.int32], enough: int) -> int:
        """Slabs without another holder, counted from the least recently used on until there are enough. waived: int32
        [num_slabs], references of each slab that do not count."""
        found = 0
        for _, slabs in _some_at_a_time(self._entries.items(), enough):
            is_alone = (self._allocator.references(slabs) - waived[slabs]).max(axis=1) == 1
            found += int(is_alone.sum()) * slabs.shape[1]
            if found >= enough:
                break
        return found

    def evict(self, num_slabs: int, among: npt.NDArray[np.bool_]) -> bool:
        """Drop entries without a lease, the least recently used first, until they gave `num_slabs` or there is none;
        False when there was none. among: [num_slabs], those that may go; all of an entry's may, or none."""
        evicted: list[bytes] = []
        entries = ((name, slabs) for name, slabs in self._entries.items() if among[slabs[0]])
        for names, slabs in _some_at_a_time(entries, num_slabs):
            most = -(-num_slabs // slabs.shape[1]) - len(evicted)
            is_alone = self._allocator.references(slabs).max(axis=1) == 1
            evicted += [names[place] for place in np.flatnonzero(is_alone)[:most]]
            if len(evicted) * slabs.shape[1] >= num_slabs:
                break
        self.ages.note_evicted(evicted)
        self._drop(evicted)
        return bool(evicted)

    def drop_chain(self, hashes: Sequence[bytes], held: npt.NDArray[np.int32]) -> set[bytes]:
        """Drop these entries, and those that are of no use without them, leased or not; returns which. held: int32
        [num_slabs], above 0 for slabs whose entries stay."""
        wanted, dropped = set(hashes), set[bytes]()
        # A predecessor is never older than what follows it.
        for name, slabs in reversed(self._entries.items()):
            if (name in wanted or self._before.get(name) in dropped) and not held[slabs].any():
                dropped.add(name)
        self._drop(dropped)
        return dropped

    def drop_slabs(self, slab_ids: npt.NDArray[np.int32]) -> set[bytes]:
        """Drop the entries over any of these slabs, and those that are of no use without them; returns which."""
        wanted = [name for name, slabs in self._entries.items() if np.isin(slabs, slab_ids).any()]
        return self.drop_chain(wanted, np.zeros(self._allocator.num_slabs, np.int32))

    def clear(self) -> None:
        """Drop every entry, leased or not; leased slabs live on with their holders."""
        self._drop(tuple(self._entries))

    def _drop(self, names: Collection[bytes]) -> None:
        if names:
            self._allocator.release(np.concatenate([self._entries.pop(name) for name in names]))
        for name in names:
            self._before.pop(name, None)
        self.ages.forget(names)

    def _touch(self, hashes: Sequence[bytes]) -> None:
        for value in reversed(hashes):
            self._entries.move_to_end(value)
        if hashes:
            self.used_at[np.concatenate([self._entries[value] for value in hashes])] = self._clock()


def _some_at_a_time(
    entries: Iterable[tuple[bytes, npt.NDArray[np.int32]]], num_slabs: int
) -> Iterator[tuple[list[bytes], npt.NDArray[np.int32]]]:
    """These entries, as many at a time as may be enough for `num_slabs`: their names, and their slabs
    [n, num_layers]."""
    left = iter(entries)
    for first in left:
        some = [first, *islice(left, max(8, num_slabs // first[1].size))]
        yield [name for name, _ in some], np.stack([slabs for _, slabs in some])
