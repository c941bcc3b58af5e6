"""Items of several owners, handed out owner by owner, so that nobody's many delay another's few."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Turns(Generic[ItemT]):
    """A queue for each owner; who had a turn last goes last. Pure: no clock, no I/O."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, deque[ItemT]] = OrderedDict()  # whose turn it is first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count(self, owner: str) -> int:
        """Return how many items an owner has."""
        return len(self._items.get(owner, ()))

    def add(self, owner: str, item: ItemT) -> None:
        """Put an item behind the others of its owner."""
        self._items.setdefault(owner, deque()).append(item)
        self._count += 1

    def take(self) -> ItemT:
        """Return the oldest item of the owner whose turn it is; `KeyError` where there is none."""
        owner, own = self._items.popitem(last=False)
        item = own.popleft()
        if own:
            self._items[owner] = own
        self._count -= 1
        return item

    def largest(self) -> str:
        """Return the owner with most items; `ValueError` where there is none."""
        return max(self._items, key=self.count)

    def take_newest(self, owner: str) -> ItemT:
        """Return the newest item of an owner, which has some."""
        item = self._items[owner][-1]
        self.discard(owner, item)
        return item

    def discard(self, owner: str, item: ItemT) -> bool:
        """Take an item out; return whether it was there."""
        own = self._items.get(owner)
        if own is None or item not in own:
            return False
        own.remove(item)
        self._count -= 1
        if not own:
            del self._items[owner]
        return True
