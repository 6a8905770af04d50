"""Sealed slabs by content: a chain of hashes, one for each full slab of all layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from carrel.process.histogram import Histogram
from kv_store.client.errors import InvalidStoreRequest
from kv_store.slabs import Among, SlabAllocator, SlabArray


class LastUses:
    """The last use of each of the places 0..num_places-1. Not thread-safe: the store's lock guards it.

    There may be thousands of places, so every call works on whole arrays.

    at: float64 [num_places], by the clock.
    """

    def __init__(self, num_places: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.at = np.zeros(num_places)
        # Which of all uses was a place's last: several may be at one time.
        self._turns = np.zeros(num_places, np.int64)
        self._num_uses = 0

    def renew(self, places: npt.NDArray[np.int64]) -> None:
        """These are used now, the first of them last."""
        self._num_uses += places.size
        self._turns[places[::-1]] = np.arange(self._num_uses - places.size, self._num_uses)
        self.at[places] = self._clock()

    def oldest(self, among: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
        """Return up to `count` of these places, the least recently used first."""
        if count < among.size:
            among = among[np.argpartition(self._turns[among], count)[:count]]
        return among[np.argsort(self._turns[among])]


HASH_BYTES = 32
# in seconds: from a chat's next turn to a week
AGE_BOUNDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, 604800.0)


def check_hashes(hashes: Sequence[bytes]) -> None:
    """Raises InvalidStoreRequest unless every hash has 32 bytes, and each is there once."""
    if any(len(value) != HASH_BYTES for value in hashes):
        raise InvalidStoreRequest(f"a prefix hash must have {HASH_BYTES} bytes")
    if len(set(hashes)) < len(hashes):
        raise InvalidStoreRequest("a prefix has a hash twice")


@dataclass(frozen=True, slots=True)
class PrefixAges:
    """Times in seconds that show whether the arena is large enough.

    reuse_gap: from the previous use of a prefix until a prompt shares it, taken at the last slabs that are shared.
    evicted_idle, evicted_lifetime: from an evicted entry's last use, and from its listing, until it is evicted.
    """

    reuse_gap: Histogram = field(default_factory=lambda: Histogram(AGE_BOUNDS))
    evicted_idle: Histogram = field(default_factory=lambda: Histogram(AGE_BOUNDS))
    evicted_lifetime: Histogram = field(default_factory=lambda: Histogram(AGE_BOUNDS))


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """slabs: int32 [num_layers], of which the first is the entry's place. before: what precedes it in its chain; None:
    it is the first."""

    name: bytes
    slabs: npt.NDArray[np.int32]
    place: int
    before: bytes | None
    listed_at: float


class PrefixDirectory:
    """Holds one reference to every slab it lists; entries without another holder are evicted, oldest first.

    A hash covers everything before it, so an entry is of use only behind its predecessors. Each use renews the
    chain from its end to its start: a predecessor is never older than what follows it.
    """

    def __init__(self, allocator: SlabAllocator, clock: Callable[[], float]) -> None:
        self._allocator = allocator
        self._clock = clock
        self.ages = PrefixAges()
        self._entries: dict[bytes, _Entry] = {}
        self._at_place: dict[int, _Entry] = {}
        # [num_slabs], of the entries' places, as `_uses`
        self._is_place = np.zeros(allocator.num_slabs, bool)
        self._uses = LastUses(allocator.num_slabs, clock)

    def __len__(self) -> int:
        return len(self._entries)

    def publish(self, hashes: Sequence[bytes], table: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """List the first len(hashes) columns of `table` [num_layers, n]; slabs already listed stay as they are. Returns
        the slabs that are new here."""
        added = [np.empty(0, np.int32)]
        now = self._clock()
        for i, value in enumerate(hashes):
            if value in self._entries:
                continue
            slabs = table[:, i].copy()
            if self._is_place[slabs[0]]:
                # They have another name, and what follows on this one is not found without them.
                hashes = hashes[:i]
                break
            self._allocator.retain(slabs)
            entry = _Entry(value, slabs, int(slabs[0]), hashes[i - 1] if i else None, now)
            self._entries[value] = self._at_place[entry.place] = entry
            self._is_place[entry.place] = True
            added.append(slabs)
        self.renew(hashes)
        return np.concatenate(added)

    def known(self, hashes: Sequence[bytes]) -> list[npt.NDArray[np.int32]]:
        """Slabs [num_layers] of each hash of the longest known prefix."""
        found = []
        for value in hashes:
            if (entry := self._entries.get(value)) is None:
                break
            found.append(entry.slabs)
        return found

    def lookup(self, hashes: Sequence[bytes], is_prompt: bool = False) -> list[npt.NDArray[np.int32]]:
        """As `known`, and this is a use of them. is_prompt: note how long the last of them was unused."""
        found = self.known(hashes)
        if found and is_prompt:
            self.ages.reuse_gap.observe(self._clock() - float(self._uses.at[found[-1][0]]))
        self.renew(hashes[: len(found)])
        return found

    def find(self, name: bytes) -> npt.NDArray[np.int32] | None:
        """Slabs [num_layers] of one hash, the same array for as long as it is listed; None where it is not."""
        entry = self._entries.get(name)
        return None if entry is None else entry.slabs

    def renew(self, hashes: Sequence[bytes]) -> None:
        """A chain's first hashes, all listed, are used now."""
        self._uses.renew(np.fromiter((self._entries[each].place for each in hashes), np.int64, len(hashes)))

    def are_unused(self, seconds: float, slab_ids: SlabArray) -> npt.NDArray[np.bool_]:
        """Return False for each of these slabs that is the first one of an entry used within this time."""
        return ~self._is_place[slab_ids] | (self._uses.at[slab_ids] < self._clock() - seconds)

    def num_evictable_slabs(self, waived: npt.NDArray[np.int32], enough: int) -> int:
        """Slabs without another holder, counted until there are enough. waived: int32 [num_slabs], references of each
        slab that do not count."""
        return sum(entry.slabs.size for entry in self._alone(self._places, enough, waived))

    def evictable_slabs(self, waived: npt.NDArray[np.int32]) -> SlabArray:
        """All slabs of entries without another holder. waived: as above."""
        slabs = np.array(
            [entry.slabs for entry in self._alone(self._places, self._allocator.num_slabs, waived)]
        )
        return slabs.ravel().astype(np.int64)

    def evict(self, num_slabs: int, among: Among) -> bool:
        """Drop entries without a lease, the least recently used first, until they gave `num_slabs` or there is none;
        False when there was none. among: of an entry's slabs all may go, or none."""
        places, now = self._places, self._clock()
        evicted = self._alone(places[among(places)], num_slabs)
        for entry in evicted:
            self.ages.evicted_idle.observe(now - float(self._uses.at[entry.place]))
            self.ages.evicted_lifetime.observe(now - entry.listed_at)
        self._drop([entry.name for entry in evicted])
        return bool(evicted)

    def drop_chain(self, hashes: Sequence[bytes], held: npt.NDArray[np.int32]) -> set[bytes]:
        """Drop these entries, and those that are of no use without them, leased or not; returns which. held: int32
        [num_slabs], above 0 for slabs whose entries stay."""
        wanted, dropped = set(hashes), set[bytes]()
        # A predecessor is never older than what follows it.
        for place in reversed(self._uses.oldest(self._places, len(self._entries)).tolist()):
            entry = self._at_place[place]
            if (entry.name in wanted or entry.before in dropped) and not held[entry.slabs].any():
                dropped.add(entry.name)
        self._drop(dropped)
        return dropped

    def drop_slabs(self, slab_ids: npt.NDArray[np.int32]) -> set[bytes]:
        """Drop the entries over any of these slabs, and those that are of no use without them; returns which."""
        is_dropped = np.zeros(self._allocator.num_slabs, bool)
        is_dropped[slab_ids] = True
        wanted = [name for name, entry in self._entries.items() if is_dropped[entry.slabs].any()]
        return self.drop_chain(wanted, np.zeros(self._allocator.num_slabs, np.int32))

    def clear(self) -> None:
        """Drop every entry, leased or not; leased slabs live on with their holders."""
        self._drop(tuple(self._entries))

    @property
    def _places(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self._is_place)

    def _alone(
        self,
        places: npt.NDArray[np.int64],
        num_slabs: int,
        waived: npt.NDArray[np.int32] | None = None,
    ) -> list[_Entry]:
        """Return the least recently used entries at these places that have no other holder, enough for `num_slabs`."""

        def num_holders(slab_ids: SlabArray) -> npt.NDArray[np.int32]:
            found = self._allocator.references(slab_ids)
            return found if waived is None else found - waived[slab_ids]

        places = places[num_holders(places) == 1]
        while places.size:
            count = -(-num_slabs // self._at_place[int(places[0])].slabs.size)
            found = [self._at_place[place] for place in self._uses.oldest(places, count).tolist()]
            is_alone = num_holders(np.stack([entry.slabs for entry in found])).max(axis=1) == 1
            if is_alone.all():
                return found
            # Of some only slabs of other layers are held.
            held = [entry.place for entry, alone in zip(found, is_alone, strict=True) if not alone]
            places = places[~np.isin(places, held)]
        return []

    def _drop(self, names: Collection[bytes]) -> None:
        if not names:
            return
        entries = [self._entries.pop(name) for name in names]
        self._allocator.release(np.concatenate([entry.slabs for entry in entries]))
        for entry in entries:
            del self._at_place[entry.place]
            self._is_place[entry.place] = False
