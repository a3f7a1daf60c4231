"""Prompts that are evicted last: of streams that decode on another worker. Should that one die, its
successor pulls them from here instead of having them computed again."""

from collections import OrderedDict
from collections.abc import Iterable

from paceline.engine.page_pool import PagePool

MAX_KEPT = 4096  # slots; the oldest are forgotten first


class KeptPrompts:
    """By slot, also after its end. A hint: pages are not held, they only go after all others."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._lives: OrderedDict[int, list[tuple[int, int]]] = OrderedDict()  # page, generation

    def __len__(self) -> int:
        return len(self._lives)

    def keep(self, slot: int, pages: Iterable[int]) -> None:
        """Those of `pages` that have a name."""
        self.let_go(slot)
        with self._pool.lock:
            named = [page for page in pages if self._pool.pages[page].key is not None]
            self._lives[slot] = [(page, self._pool.pages[page].generation) for page in named]
            for page in named:
                self._pool.pages[page].num_keepers += 1
        while len(self._lives) > MAX_KEPT:
            self.let_go(next(iter(self._lives)))

    def let_go(self, slot: int) -> None:
        """As if they had just been used: whoever goes on may come at once."""
        lives = self._lives.pop(slot, ())
        with self._pool.lock:
            for page, generation in reversed(lives):
                if self._pool.pages[page].generation == generation:
                    self._pool.pages[page].num_keepers -= 1
                    self._pool.touch(page)
