"""The KV that a simulated worker holds: blocks of 512 tokens, least recently used goes first."""

from collections import OrderedDict
from collections.abc import Sequence

from paceline.sim.trace import BLOCK_TOKENS, HASH_BLOCKS


class BlockCache:
    """`changes`: what was stored (True) and evicted since they were last taken, in order."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.changes: list[tuple[bool, int]] = []
        self._num_users: OrderedDict[int, int] = OrderedDict()  # by block, oldest use first
        self._num_in_use = 0
        self._num_private = 0  # pages of no block that is named

    @property
    def num_free_pages(self) -> int:
        """Free, or cached and not in use."""
        return self.num_pages - HASH_BLOCKS * self._num_in_use - self._num_private

    def num_cached_tokens(self, blocks: Sequence[int]) -> int:
        count = 0
        for block in blocks:
            if block not in self._num_users:
                break
            count += 1
        return BLOCK_TOKENS * count

    def hold(self, blocks: Sequence[int], num_pages: int) -> None:
        """Keeps what is cached of `blocks`, and so many private pages, for a request."""
        for block in blocks:
            if block in self._num_users:
                self._use(block)
        self._num_private += num_pages
        self._evict()

    def store(self, blocks: Sequence[int], held: Sequence[int]) -> None:
        """A request that holds `held` of its blocks has computed the rest."""
        known = set(held)
        for block in blocks:
            if block in known:
                continue
            if block not in self._num_users:
                self._num_users[block] = 0
                self.changes.append((True, block))
            self._use(block)
        self._evict()

    def release(self, blocks: Sequence[int], num_pages: int) -> None:
        """The last blocks of a prompt go first, so that its beginning outlives them."""
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._num_in_use -= 1
                self._num_users.move_to_end(block)
        self._num_private -= num_pages

    def _use(self, block: int) -> None:
        if not self._num_users[block]:
            self._num_in_use += 1
        self._num_users[block] += 1
        self._num_users.move_to_end(block)

    def _evict(self) -> None:
        most = (self.num_pages - self._num_private) // HASH_BLOCKS
        while len(self._num_users) > most:
            victim = next((b for b, users in self._num_users.items() if not users), None)
            if victim is None:
                return
            del self._num_users[victim]
            self.changes.append((False, victim))
