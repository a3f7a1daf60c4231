"""Pages of one sequence in one page group."""

from dataclasses import dataclass, field

NO_PAGE = -1


@dataclass(slots=True)
class BlockTable:
    """`pages[block]`; NO_PAGE for blocks before `first`, which no token to come sees.

    `credit`: pages promised to the sequence here. In a group with a window a page that leaves it
    returns to the credit."""

    pages: list[int] = field(default_factory=list)
    first: int = 0
    credit: int = 0

    @property
    def held(self) -> list[int]:
        return self.pages[self.first :]

    def begin_at(self, first: int) -> None:
        """Of an empty table: there are no pages for the blocks before."""
        self.pages = [NO_PAGE] * first
        self.first = first

    def pop_before(self, first: int) -> list[int]:
        """Takes out the pages of the blocks before `first`."""
        popped = self.pages[self.first : first]
        self.pages[self.first : first] = [NO_PAGE] * len(popped)
        self.first = max(self.first, first)
        return popped
