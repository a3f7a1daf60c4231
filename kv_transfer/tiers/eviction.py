"""Which page a full tier gives up: LRU, or ARC, which a scan of new pages does not flush.

ARC (Megiddo and Modha, 2003): pages seen once and pages seen again have a list each; the target
size of the first grows when a page comes back that was evicted from it, and shrinks when one comes
back that was evicted from the second. Names of evicted pages ("ghosts") are kept, as many as there
are places at most.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from paceline.kv_transfer.tiers.base import PageName

Names = OrderedDict[PageName, None]  # least recently used first
IsEvictable = Callable[[PageName], bool]


class EvictionPolicy(Protocol):
    """Order of the pages that a tier holds. Not thread-safe."""

    def add(self, name: PageName) -> None:
        """A page that was not held."""
        ...

    def touch(self, name: PageName) -> None:
        """A held page is used."""
        ...

    def remove(self, name: PageName) -> None:
        """A held page is gone for another reason than eviction."""
        ...

    def evict(self, is_evictable: IsEvictable) -> PageName | None:
        """Gives up one held page; None if none may go."""
        ...


class Lru:
    def __init__(self, num_places: int) -> None:
        self._names: Names = OrderedDict()

    def add(self, name: PageName) -> None:
        self._names[name] = None

    def touch(self, name: PageName) -> None:
        self._names.move_to_end(name)

    def remove(self, name: PageName) -> None:
        del self._names[name]

    def evict(self, is_evictable: IsEvictable) -> PageName | None:
        name = _first(self._names, is_evictable)
        if name is not None:
            del self._names[name]
        return name


class Arc:
    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._target = 0.0  # places for pages seen once
        self._once: Names = OrderedDict()
        self._again: Names = OrderedDict()
        self._once_ghosts: Names = OrderedDict()
        self._again_ghosts: Names = OrderedDict()

    def add(self, name: PageName) -> None:
        if name in self._once_ghosts:
            step = max(1.0, len(self._again_ghosts) / len(self._once_ghosts))
            self._target = min(self._num_places, self._target + step)
            del self._once_ghosts[name]
            self._again[name] = None
        elif name in self._again_ghosts:
            step = max(1.0, len(self._once_ghosts) / len(self._again_ghosts))
            self._target = max(0.0, self._target - step)
            del self._again_ghosts[name]
            self._again[name] = None
        else:
            self._once[name] = None
        self._trim_ghosts()

    def touch(self, name: PageName) -> None:
        self._once.pop(name, None)
        self._again[name] = None
        self._again.move_to_end(name)

    def remove(self, name: PageName) -> None:
        if name in self._once:
            del self._once[name]
        else:
            del self._again[name]

    def evict(self, is_evictable: IsEvictable) -> PageName | None:
        lists = [(self._once, self._once_ghosts), (self._again, self._again_ghosts)]
        if len(self._once) <= self._target:
            lists.reverse()
        for names, ghosts in lists:
            name = _first(names, is_evictable)
            if name is not None:
                del names[name]
                ghosts[name] = None
                self._trim_ghosts()
                return name
        return None

    def _trim_ghosts(self) -> None:
        while len(self._once) + len(self._once_ghosts) > self._num_places and self._once_ghosts:
            self._once_ghosts.popitem(last=False)
        while len(self._once_ghosts) + len(self._again_ghosts) > self._num_places:
            ghosts = self._again_ghosts or self._once_ghosts
            ghosts.popitem(last=False)


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": Lru, "arc": Arc}


def _first(names: Iterable[PageName], is_evictable: IsEvictable) -> PageName | None:
    return next((name for name in names if is_evictable(name)), None)
