"""Pages of sequences: grants them, shares prefixes, commits blocks, lets go.

Credit: pages that an admitted request will need are promised to it, so that admission of others
cannot take them. A sequence spends its own credit first, and renews it when the pool has room.

In a page group with a window a sequence holds the blocks that tokens to come can see, and no more:
`slide` lets go of the others. All that it may come to hold there is promised at its admission, and
every page it takes, shared or new, costs one of that promise.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Blocks
from dataclasses import dataclass
from enum import Enum

from paceline.core.kv_layout import PAGE_TOKENS, PageGroup
from paceline.engine.allowances import Pages
from paceline.engine.block_table import BlockTable
from paceline.engine.messages import GrantedRun
from paceline.engine.page_pool import PagePool, PageState
from paceline.engine.prefix_cache import PrefixCache, packed_block
from paceline.engine.refusal import Refusal
from paceline.engine.sequence import Sequence, pages_of


@dataclass(frozen=True, slots=True)
class Grant:
    """`num_hits` leading blocks were found. `missing`: by page group, where blocks go that shall be
    filled from outside first; empty if none are."""

    num_hits: int
    missing: list[GrantedRun]


class Room(Enum):
    MADE = "made"
    LATER = "later"  # what is promised is pinned by readers, or fenced
    NONE = "none"  # unless others give back theirs


@dataclass(slots=True)
class StepClock:
    """Numbers of steps: a page freed now may be written until step `launched` has retired."""

    launched: int = 0
    retired: int = 0

    @property
    def fence(self) -> int | None:
        return self.launched if self.launched > self.retired else None


class Allocator:
    """`on_pages(sequence, group, first, end)` is called when pages of a sequence change."""

    def __init__(
        self,
        groups: tuple[PageGroup, ...],
        cache: PrefixCache,
        clock: StepClock,
        on_pages: Callable[[Sequence, int, int, int], None],
    ) -> None:
        self.groups = groups
        self.pool: PagePool = cache.pool
        self.cache = cache
        self.clock = clock
        self.on_pages = on_pages
        self._windowed = [i for i, group in enumerate(groups) if group.window]

    def grant(
        self, sequence: Sequence, max_hit_blocks: int, allowance: Pages, num_offered: int = 0
    ) -> Grant | None:
        """What a sequence needs to be computed: all pages of its tokens under full attention, found
        by name or new, and a promise of the rest of `allowance`; or nothing. Of `num_offered`
        leading blocks those that are not here shall be filled before it is computed.

        None: it does not fit now.
        """
        sequence.extend_keys(max_hit_blocks)
        keys = sequence.keys[:max_hit_blocks]
        if not self._may_fit(sequence, keys, allowance):
            return None
        packed = sequence.tokens[: max_hit_blocks * PAGE_TOKENS].tobytes()
        missing: list[GrantedRun] | None = []
        with self.pool.lock:
            num_hits, hits = self.cache.match(keys, packed)
            if num_offered > num_hits:
                missing = self.grant_destination(sequence, num_offered * PAGE_TOKENS, allowance)
            elif not self._grant_computed(sequence, num_hits, hits, allowance):
                missing = None
            if missing is None:
                sequence.refusal = Refusal.now(self.cache, keys, packed)
                return None
        sequence.refusal = None
        return Grant(num_hits, missing)

    def grant_destination(
        self, sequence: Sequence, num_tokens: int, allowance: Pages, spared: int = 0
    ) -> list[GrantedRun] | None:
        """The same for a sequence of which the KV of `num_tokens` will come from outside: in each
        group the blocks that the token after them sees, those that lead among them found by name
        if they are here. `spared` more pages must be left for others.

        Returns where those go that are not here, by group. None: it does not fit now.
        """
        num_full, end = num_tokens // PAGE_TOKENS, pages_of(num_tokens)
        sequence.extend_keys(num_full)
        packed = sequence.tokens[: num_full * PAGE_TOKENS].tobytes()
        firsts = [group.first_block(num_tokens) for group in self.groups]
        runs = []
        with self.pool.lock:
            hits = [
                self.cache.run_from(i, first, sequence.keys[:num_full], packed)
                for i, first in enumerate(firsts)
            ]
            if not self._begin(sequence, firsts, hits, allowance, spared):
                return None
            for i, table in enumerate(sequence.tables):
                start = len(table.pages)
                most = end if self.groups[i].window else pages_of(sequence.num_tokens)
                self._take(sequence, i, most - start)
                runs.append(GrantedRun(start, table.pages[start:end]))
        self._count_blocks(sequence)
        return runs

    def take_filled(self, sequence: Sequence, num_blocks: int) -> bool:
        """Counts `num_blocks` leading blocks as computed, if all that is held of them is named."""
        held = [page for table in sequence.tables for page in table.pages[table.first : num_blocks]]
        if any(self.pool.pages[page].key is None for page in held):
            return False
        sequence.num_computed = num_blocks * PAGE_TOKENS
        sequence.num_committed = num_blocks
        return True

    def extend(self, sequence: Sequence, num_blocks: int, renewal: int = 0) -> Room:
        """Pages for its first `num_blocks` blocks. Under full attention its credit is renewed by up
        to `renewal` pages when none is left."""
        with self.pool.lock:
            for i, table in enumerate(sequence.tables):
                while len(table.pages) < num_blocks:
                    if not table.credit and not self.groups[i].window:
                        self._promise(table, max(0, min(renewal, self.pool.num_available)))
                    missing = num_blocks - len(table.pages)
                    if not self._take(sequence, i, min(missing, max(table.credit, 1))):
                        return Room.LATER if table.credit else Room.NONE
        self._count_blocks(sequence)
        return Room.MADE

    def slide(self, sequence: Sequence) -> None:
        """Lets go of blocks that have left the window of a group. They are full, hence named."""
        for i in self._windowed:
            table = sequence.tables[i]
            first, last = table.first, self.groups[i].first_block(sequence.num_computed)
            if last > first:
                with self.pool.lock:
                    popped = table.pop_before(last)
                    self.pool.release(popped, self.clock.fence)
                    self._promise(table, len(popped))
                self.on_pages(sequence, i, first, last)

    def share_prefix(self, source: Sequence, other: Sequence, allowance: Pages) -> list[int] | None:
        """Gives `other` the pages of `source`, from which it was forked: the full ones shared, a
        page of its own of each group for the partial one, which has to be copied. `allowance` is
        promised to it in groups with a window.

        Returns its own pages. None: there is no room.
        """
        num_full, num_partial = divmod(source.num_computed, PAGE_TOKENS)
        num_own = 1 if num_partial else 0
        with self.pool.lock:
            wanted = [
                most if group.window else num_own
                for group, most in zip(self.groups, allowance, strict=True)
            ]
            lacking = [
                max(0, most - table.credit)
                for most, table in zip(wanted, other.tables, strict=True)
            ]
            too_few = self.pool.num_physical < num_own * len(self.groups)
            if too_few or (any(lacking) and sum(lacking) > self.pool.num_available):
                return None
            for i, (table, given) in enumerate(zip(other.tables, source.tables, strict=True)):
                self._promise(table, lacking[i])
                is_paid = bool(self.groups[i].window)
                self._share(table, given.first, given.pages[given.first : num_full], is_paid)
                self._take(other, i, num_own)
        self._count_blocks(other)
        other.is_granted = True
        other.num_computed = source.num_computed
        other.num_committed = source.num_committed
        return [table.pages[-1] for table in other.tables] if num_own else []

    def split_credit(self, source: Sequence, others: list[Sequence], allowance: Pages) -> None:
        """Shares the credit of a group out among its choices: evenly under full attention; with a
        window each gets `allowance` as long as there is some, and the rest is given back."""
        for i, table in enumerate(source.tables):
            tables = [other.tables[i] for other in others]
            if self.groups[i].window:
                spare = table.credit + len(table.held) - allowance[i]
                shares = [
                    max(0, min(allowance[i], spare - n * allowance[i])) for n in range(len(others))
                ]
                self._promise(table, -max(0, spare - sum(shares)))
            else:
                share, rest = divmod(table.credit, len(others) + 1)
                shares = [share + (1 if n < rest else 0) for n in range(len(others))]
            for other, given in zip(tables, shares, strict=True):
                other.credit += given
                table.credit -= given

    def give_back_credit(self, sequence: Sequence) -> None:
        """Nothing more will be computed."""
        with self.pool.lock:
            for table in sequence.tables:
                self._promise(table, -table.credit)

    def release(self, sequence: Sequence, transfer_slot: int | None = None) -> None:
        """Lets go of all its pages and its credit."""
        tables = sequence.tables
        longest = max(len(table.pages) for table in tables)
        pages = [  # in the order of blocks: those of a prefix age together
            table.pages[block]
            for block in range(min(table.first for table in tables), longest)
            for table in tables
            if table.first <= block < len(table.pages)
        ]
        with self.pool.lock:
            self.pool.release(pages, self.clock.fence, transfer_slot)
            self.give_back_credit(sequence)
        for table in tables:
            table.begin_at(0)
        sequence.is_granted = False
        sequence.num_blocks = 0
        sequence.num_computed = 0
        sequence.num_committed = 0

    def commit(
        self,
        sequence: Sequence,
        group: int,
        blocks: Blocks[int],
        checksums: Iterable[tuple[int, ...]],
    ) -> None:
        """Names full, computed blocks, in rising order. Where a name exists the sequence takes the
        first copy."""
        table = sequence.tables[group]
        sequence.extend_keys(blocks[-1] + 1)
        start, end = blocks[0], blocks[-1] + 1
        packed = sequence.tokens[start * PAGE_TOKENS : end * PAGE_TOKENS].tobytes()
        with self.pool.lock:
            new = {
                block: (sequence.keys[block], packed_block(packed, block - start), sums)
                for block, sums in zip(blocks, checksums, strict=True)
                if table.first <= block < len(table.pages)
                and self.pool.pages[table.pages[block]].key is None
            }
            pages = [table.pages[block] for block in new]
            bearers = self.cache.commit(group, pages, list(new.values()))
            for block, page, bearer in zip(new, pages, bearers, strict=True):
                if bearer != page:
                    self._take_first_copy(sequence, group, block, bearer)

    def _take_first_copy(self, sequence: Sequence, group: int, block: int, first: int) -> None:
        pages = sequence.tables[group].pages
        self.pool.share([first])
        self.pool.release([pages[block]], self.clock.fence)
        pages[block] = first
        self.on_pages(sequence, group, block, block + 1)

    def _may_fit(self, sequence: Sequence, keys: list[bytes], allowance: Pages) -> bool:
        """False: as far as its last refusal tells, it does not."""
        if sequence.refusal is None:
            return True
        with self.pool.lock:
            shared = sequence.refusal.most_shared(self.cache, keys)
            return shared is None or sum(allowance) - shared <= self.pool.num_available

    def _grant_computed(
        self, sequence: Sequence, num_hits: int, hits: list[list[int]], allowance: Pages
    ) -> bool:
        """Goes on behind `num_hits` leading blocks. False: it does not fit."""
        firsts = [num_hits - len(pages) for pages in hits]
        if not self._begin(sequence, firsts, hits, allowance):
            return False
        for i, group in enumerate(self.groups):
            if not group.window:
                self._take(sequence, i, pages_of(sequence.num_tokens) - num_hits)
        self._count_blocks(sequence)
        sequence.num_computed = num_hits * PAGE_TOKENS
        sequence.num_committed = num_hits
        return True

    def _begin(
        self,
        sequence: Sequence,
        firsts: list[int],
        hits: list[list[int]],
        allowance: Pages,
        spared: int = 0,
    ) -> bool:
        """Promises `allowance` and shares `hits`, blocks from `firsts` on, if it fits: all of them
        before a page is taken, which might evict one. Sharing what is in use costs nothing, except
        where a window slides: there each sequence needs pages of its own later."""
        shared = sum(
            self.pool.pages[page].state is not PageState.CACHED
            for group, pages in zip(self.groups, hits, strict=True)
            if not group.window
            for page in pages
        )
        if sum(allowance) - shared > self.pool.num_available - spared:
            return False
        for i, table in enumerate(sequence.tables):
            self._promise(table, allowance[i])
            self._share(table, firsts[i], hits[i])
        sequence.is_granted = True
        return True

    def _share(self, table: BlockTable, first: int, pages: list[int], is_paid: bool = True) -> None:
        """An empty table begins with `pages`, as its blocks from `first` on."""
        table.begin_at(first)
        self.pool.share(pages)
        if is_paid:
            self._promise(table, -len(pages))
        table.pages += pages

    def _take(self, sequence: Sequence, group: int, num_pages: int) -> bool:
        """New pages at the end of a table, from its credit as far as that reaches."""
        table = sequence.tables[group]
        spent = min(num_pages, table.credit)
        pages = self.pool.allocate(num_pages, group, promised=spent)
        if pages is None:
            return False
        table.credit -= spent
        first = len(table.pages)
        table.pages += pages
        self.on_pages(sequence, group, first, len(table.pages))
        return True

    def _promise(self, table: BlockTable, num_pages: int) -> None:
        self.pool.promise(num_pages)
        table.credit += num_pages

    def _count_blocks(self, sequence: Sequence) -> None:
        sequence.num_blocks = min(len(table.pages) for table in sequence.tables)
