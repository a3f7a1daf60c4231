"""What a pull is asked for: runs of full blocks, by page group."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Full blocks [start, end) of a page group."""

    group: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start
