"""The pages of all page groups: who uses each, and when it may be written again.

State of a page, the first that holds (so that they always sum to the pool):

    mapped       a sequence refers to it
    pinned       a reader on another worker copies from it
    quarantined  something launched earlier may still write it: a step, a transfer
    cached       it has a name; reused by name, or evicted, least recently used first, those with
                 keepers after all others
    free

A page that is named is never written again, so it needs no fence when it is let go.

Sequences that share a page of a group with a window leave it at different times, and each takes
other pages then. What sharing spares for a while is therefore not given to new requests: every
reference but the first counts as a page held back.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from paceline.engine.page_books import books_problem, slice_problem


class PageState(IntEnum):
    FREE = 0
    MAPPED = 1
    CACHED = 2
    PINNED = 3
    QUARANTINED = 4


@dataclass(slots=True)
class Page:
    """`generation` rises whenever the page is allocated anew, for one `group`; checksums: one a KV
    head."""

    refs: int = 0
    pins: int = 0
    fences: int = 0
    num_keepers: int = 0  # who would like it to be evicted last
    generation: int = 0
    group: int = 0
    key: bytes | None = None
    packed_tokens: bytes = b""
    checksums: tuple[int, ...] = ()
    state: PageState = PageState.FREE

    def proper_state(self) -> PageState:
        if self.refs:
            return PageState.MAPPED
        if self.pins:
            return PageState.PINNED
        if self.fences:
            return PageState.QUARANTINED
        return PageState.FREE if self.key is None else PageState.CACHED


class PagePool:
    """All calls are short and take `lock`, which callers may hold around several (re-entrant).

    `num_promised` pages of those available belong to admitted requests that will need them.
    """

    def __init__(
        self,
        num_pages: int,
        max_pinned_share: float = 0.5,
        has_window: tuple[bool, ...] = (False,),  # by page group
    ) -> None:
        self.lock = threading.RLock()
        self.has_window = has_window
        self.pages = [Page() for _ in range(num_pages)]
        self.counts = [num_pages, 0, 0, 0, 0]
        self.num_promised = 0
        self.num_revived = 0  # times that a page ceased to be cached
        self.num_overlaps = 0  # references but the first to pages of groups with a window
        self.max_pinned = int(num_pages * max_pinned_share)
        self.free_pages: deque[int] = deque(range(num_pages))
        self.cached_pages: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.on_evict: Callable[[list[int]], None] = self.drop_names
        self._step_fences: deque[tuple[int, int]] = deque()  # (step, page), steps rising
        self._transfer_fences: dict[int, list[int]] = {}  # slot → pages

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def num_free(self) -> int:
        return self.counts[PageState.FREE]

    @property
    def num_cached(self) -> int:
        return self.counts[PageState.CACHED]

    @property
    def num_physical(self) -> int:
        """Pages that can be written at once."""
        return len(self.free_pages) + len(self.cached_pages)

    @property
    def num_available(self) -> int:
        """Pages that a new request may take. Negative while readers pin what left a window."""
        return self.num_physical - self.num_promised - self.num_overlaps

    def allocate(self, num_pages: int, group: int = 0, promised: int = 0) -> list[int] | None:
        """All or nothing; `promised` of them redeem an earlier promise, for which a page needs to
        be there and no more: all promises together never exceed the pool."""
        with self.lock:
            num_others = num_pages - promised
            if num_pages > self.num_physical or (num_others and num_others > self.num_available):
                return None
            self.num_promised -= promised
            return self._take(num_pages, group)

    def promise(self, num_pages: int) -> None:
        """Holds back pages for later; negative gives a promise back."""
        with self.lock:
            self.num_promised += num_pages

    def share(self, pages: Iterable[int]) -> None:
        """One more sequence refers to `pages`, which are mapped or named."""
        with self.lock:
            for page in pages:
                record = self.pages[page]
                self.num_overlaps += self.has_window[record.group] and record.refs > 0
                record.refs += 1
                self._settle(page)

    def release(
        self, pages: Sequence[int], step: int | None = None, slot: int | None = None
    ) -> None:
        """A sequence lets go of `pages`. What can still be written waits in quarantine: until
        `step` has retired, until the transfer of `slot` is closed.

        Later pages of a chain age first: a prefix is found only from its beginning.
        """
        with self.lock:
            for page in reversed(pages):
                record = self.pages[page]
                record.refs -= 1
                self.num_overlaps -= self.has_window[record.group] and record.refs > 0
                if record.refs == 0 and record.key is None:
                    self._fence(page, step, slot)
                self._settle(page)

    def retire_step(self, step: int) -> None:
        """Every step up to `step` has finished: it writes nothing any more."""
        with self.lock:
            while self._step_fences and self._step_fences[0][0] <= step:
                self._lift_fence(self._step_fences.popleft()[1])

    def close_transfer(self, slot: int) -> None:
        """No copy into pages of `slot` is in flight any more."""
        with self.lock:
            for page in self._transfer_fences.pop(slot, ()):
                self._lift_fence(page)

    def drop_names(self, pages: Iterable[int]) -> None:
        with self.lock:
            for page in pages:
                record = self.pages[page]
                record.key, record.packed_tokens, record.checksums = None, b"", ()
                self._settle(page)

    def pin(self, page: int) -> bool:
        """False when pinning it would take a promised page or exceed the share for pins."""
        with self.lock:
            record = self.pages[page]
            takes_page = record.state is PageState.CACHED
            full = self.counts[PageState.PINNED] >= self.max_pinned
            if takes_page and (full or self.num_available <= 0):
                return False
            record.pins += 1
            self._settle(page)
            return True

    def unpin(self, page: int, generation: int) -> bool:
        """False when there is no such pin: the caller's reference is of another life."""
        with self.lock:
            if not 0 <= page < len(self.pages):
                return False
            record = self.pages[page]
            if record.generation != generation or record.pins == 0:
                return False
            record.pins -= 1
            self._settle(page)
            return True

    def check_integrity(self, pages: range | None = None) -> str:
        """Empty when the books balance, else what is wrong. Of all pages the time grows with the
        pool, and nobody else gets a page meanwhile; of some it is theirs alone."""
        with self.lock:
            fenced = [page for _, page in self._step_fences]
            for held in self._transfer_fences.values():
                fenced += held
            if pages is None:
                return books_problem(self, fenced)
            return slice_problem(self, pages, fenced)

    def touch(self, page: int) -> None:
        """As if it had just been used."""
        with self.lock:
            if page in self.cached_pages:
                self.cached_pages.move_to_end(page)

    def _victims(self, num_pages: int) -> list[int]:
        """Who has keepers is passed over, and not met again soon."""
        victims: list[int] = []
        spared: list[int] = []
        for page in self.cached_pages:
            (spared if self.pages[page].num_keepers else victims).append(page)
            if len(victims) == num_pages:
                break
        for page in spared:
            self.cached_pages.move_to_end(page)
        return victims + spared[: num_pages - len(victims)]

    def _take(self, num_pages: int, group: int) -> list[int]:
        """A long prompt takes hundreds at once, while its device waits."""
        lacking = num_pages - len(self.free_pages)
        if lacking > 0:
            self.on_evict(self._victims(lacking))  # makes them free pages
        taken = [self.free_pages.popleft() for _ in range(num_pages)]
        for page in taken:
            record = self.pages[page]
            record.refs = 1
            record.generation += 1
            record.num_keepers = 0
            record.group = group
            record.state = PageState.MAPPED
        self.counts[PageState.FREE] -= num_pages
        self.counts[PageState.MAPPED] += num_pages
        return taken

    def _fence(self, page: int, step: int | None, slot: int | None) -> None:
        if step is not None:
            self._step_fences.append((step, page))
            self.pages[page].fences += 1
        if slot is not None:
            self._transfer_fences.setdefault(slot, []).append(page)
            self.pages[page].fences += 1

    def _lift_fence(self, page: int) -> None:
        self.pages[page].fences -= 1
        self._settle(page)

    def _settle(self, page: int) -> None:
        """Moves a page to the state that its counters say."""
        record = self.pages[page]
        state = record.proper_state()
        if state is record.state:
            return
        if record.state is PageState.CACHED:
            del self.cached_pages[page]
            self.num_revived += 1
        if state is PageState.CACHED:
            self.cached_pages[page] = None
        elif state is PageState.FREE:
            self.free_pages.append(page)
        self._move(record, state)

    def _move(self, record: Page, state: PageState) -> None:
        self.counts[record.state] -= 1
        self.counts[state] += 1
        record.state = state
