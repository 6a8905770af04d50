"""What waits for a disk, by owner: they take turns, so who asks much waits for itself."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Turns(Generic[Item]):
    """Not thread-safe."""

    def __init__(self) -> None:
        # Who had a turn comes last.
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()
        self._items = set[Item]()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, owner: str, item: Item) -> None:
        """An owner's, which waits where it is if it waits already."""
        if item not in self._items:
            self._items.add(item)
            self._waiting.setdefault(owner, deque()).append(item)

    def next(self) -> Item:
        """What waited longest of the owner whose turn it is; there is something."""
        owner, waiting = self._waiting.popitem(last=False)
        item = waiting.popleft()
        self._items.remove(item)
        if waiting:
            self._waiting[owner] = waiting
        return item

    def leave_one_out(self) -> None:
        """The last one of the owner that has the most; there is something."""
        owner = max(self._waiting, key=lambda each: len(self._waiting[each]))
        self._items.remove(self._waiting[owner].pop())
        if not self._waiting[owner]:
            del self._waiting[owner]

    def clear(self) -> None:
        self._waiting.clear()
        self._items.clear()
