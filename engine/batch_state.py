"""The running batch as arrays that outlive steps: changed where something changes, read whole.

A sequence that runs has a row; rows are compact, the last one moves into a gap. Arrays are
indexed by row; int64 throughout, so that nothing is converted on the way to the device. A device
keeps block tables of its own, which `take_changes` brings up to date.
"""

import numpy as np
from numpy.typing import NDArray

from paceline.engine.sequence import Sequence, Stage, pages_of

Rows = NDArray[np.int64]
TABLE_WIDTHS = 16  # widths of tables on a device are multiples: kernels are compiled for that


class BatchState:
    """`computed`: tokens whose KV exists, or is being computed; `next_token`: the last token of
    the sequence, ~i while it is the i-th that is being drawn; `block_tables`: [rows, page groups,
    blocks], 0 where there is no page."""

    def __init__(self, max_running: int, max_length: int, num_page_groups: int = 1) -> None:
        self.sequences: list[Sequence] = []
        self.max_running = max_running
        self.computed = np.zeros(max_running, np.int64)
        self.next_token = np.zeros(max_running, np.int64)
        width = -(-pages_of(max_length) // TABLE_WIDTHS) * TABLE_WIDTHS
        self.block_tables = np.zeros((max_running, num_page_groups, width), np.int64)
        self._changed = np.zeros((max_running, num_page_groups, 2), np.int64)  # blocks [first, end)
        self.temperature = np.zeros(max_running, np.float32)
        self.min_p = np.zeros(max_running, np.float32)
        self.top_k = np.zeros(max_running, np.int64)
        self.top_p = np.ones(max_running, np.float32)
        self.typical_p = np.ones(max_running, np.float32)
        self.seed = np.zeros(max_running, np.int64)
        self.num_prompt_tokens = np.zeros(max_running, np.int64)
        self.num_logprobs = np.full(max_running, -1, np.int64)
        self._by_row = (
            *(self.computed, self.next_token, self.block_tables, self.temperature, self.min_p),
            *(self.top_k, self.top_p, self.typical_p, self.seed),
            *(self.num_prompt_tokens, self.num_logprobs),
        )

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def is_full(self) -> bool:
        return len(self.sequences) == self.max_running

    def add(self, sequence: Sequence) -> None:
        row = len(self.sequences)
        self.sequences.append(sequence)
        sequence.row = row
        sequence.stage = Stage.RUNNING
        self.computed[row] = sequence.num_computed
        self.next_token[row] = sequence.tokens[sequence.num_tokens - 1]
        for group, table in enumerate(sequence.tables):
            self.block_tables[row, group, : table.first] = 0
            self.block_tables[row, group, table.first : len(table.pages)] = table.held
            self._changed[row, group] = 0, len(table.pages)
        sampling = sequence.group.spec.sampling
        self.temperature[row] = sampling.temperature
        self.min_p[row] = sampling.min_p
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.typical_p[row] = sampling.typical_p
        self.seed[row] = sampling.seed - (sampling.seed >> 63 << 64)  # the same bits, signed
        self.num_prompt_tokens[row] = sequence.group.spec.num_prompt_tokens
        self.num_logprobs[row] = sampling.num_logprobs

    def remove(self, sequence: Sequence, stage: Stage) -> None:
        row, last = sequence.row, len(self.sequences) - 1
        sequence.row = -1
        sequence.stage = stage
        moved = self.sequences.pop()
        if row != last:
            self.sequences[row] = moved
            moved.row = row
            for array in self._by_row:
                array[row] = array[last]
            self._changed[row] = [(0, len(table.pages)) for table in moved.tables]
        self._changed[last] = 0

    def set_pages(self, sequence: Sequence, group: int, first: int, end: int) -> None:
        """Blocks [first, end) of a sequence have other pages, or none."""
        if sequence.row >= 0:
            pages = sequence.tables[group].pages[first:end]
            row = self.block_tables[sequence.row, group]
            row[first:end] = [max(page, 0) for page in pages]
            changed = self._changed[sequence.row, group]
            changed[0] = min(first, changed[0]) if changed[1] else first
            changed[1] = max(end, changed[1])

    def take_changes(self) -> tuple[Rows, Rows]:
        """Of the flat block tables: places that have changed since the last call, and what is
        there now."""
        firsts, ends = self._changed[: len(self.sequences)].reshape(-1, 2).T
        lengths = ends - firsts
        starts = np.arange(len(firsts)) * self.block_tables.shape[2] + firsts
        before = np.cumsum(lengths) - lengths
        places = np.repeat(starts - before, lengths) + np.arange(lengths.sum())
        self._changed[: len(self.sequences)] = 0
        return places, self.block_tables.reshape(-1)[places]

    def advance(self, sequence: Sequence, num_new: int) -> None:
        """`num_new` more of its tokens are computed, or will be."""
        sequence.num_computed += num_new
        self.computed[sequence.row] = sequence.num_computed

    def promise(self, sequence: Sequence, draw: int) -> None:
        """Its next token is draw number `draw` of the step under way."""
        sequence.promise()
        self.next_token[sequence.row] = ~draw

    def append(self, sequence: Sequence, token_id: int) -> None:
        """A token was accepted."""
        sequence.append(token_id)
        if sequence.row >= 0:
            self.next_token[sequence.row] = token_id
