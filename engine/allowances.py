"""How many pages of each page group a sequence may come to hold, and how long it can be.

    full attention     pages of all its tokens
    a window of w      those that a chunk of c tokens sees and fills: w + c - 1 tokens, which lie
                       in at most ceil((w + c - 2) / 16) + 1 pages, however long the sequence is

A sequence is promised all that it may hold in groups with a window, so that it never has to wait
for others there; of full attention its tokens and a piece of its output.
"""

import bisect

from paceline.core.kv_layout import PAGE_TOKENS, KVLayout, PageGroup
from paceline.engine.config import EngineConfig
from paceline.engine.sequence import Sequence, pages_of

_MIN_CHUNK_TOKENS = 256  # smaller ones compute slower than they save pages

Pages = tuple[int, ...]  # by page group


class Allowances:
    """`max_chunk_tokens` bounds every chunk of a prompt, `max_length` every sequence."""

    def __init__(
        self, layout: KVLayout, num_pages: int, context_length: int, config: EngineConfig
    ) -> None:
        self.groups = layout.groups
        self.num_pages = num_pages
        self.output_window_tokens = config.output_window_tokens
        windows = [group.window for group in layout.groups if group.window]
        self.max_chunk_tokens = config.max_batch_tokens
        if windows:
            widest = max(_MIN_CHUNK_TOKENS, min(windows) // 2)
            self.max_chunk_tokens = min(config.max_batch_tokens, widest)
        lengths = range(pages_of(context_length) + 1)
        num_blocks = bisect.bisect_right(lengths, num_pages, key=self._num_pages_at_most) - 1
        self.max_length = min(context_length, num_blocks * PAGE_TOKENS)

    def most(self) -> Pages:
        """Of a sequence, however long; 0 where there is no such bound."""
        return tuple(
            self._for_prefill(group, self.max_length) if group.window else 0
            for group in self.groups
        )

    def of_prompt(self, sequence: Sequence) -> Pages:
        """For its tokens alone."""
        return tuple(self._for_prefill(group, sequence.num_tokens) for group in self.groups)

    def of_choice(self, max_length: int) -> Pages:
        """For one more choice while it decodes, in groups with a window; 0 in others."""
        return tuple(
            _seen_at_most(group, max_length, 1) if group.window else 0 for group in self.groups
        )

    def of_request(self, sequence: Sequence, num_choices: int, *, is_pulled: bool = False) -> Pages:
        """For its tokens, which are computed here unless they are pulled, and a window of output
        of every choice; the latter as far as the pool can ever hold it."""
        choice = self.of_choice(sequence.group.max_length)
        base, wanted = [], []
        for group, decoding in zip(self.groups, choice, strict=True):
            prompt = (
                0 if is_pulled and group.window else self._for_prefill(group, sequence.num_tokens)
            )
            base.append(max(prompt, decoding))
            more = num_choices * decoding - base[-1]
            wanted.append(more if group.window else self._output(sequence, num_choices))
        room = self.num_pages - sum(base)
        for i, more in enumerate(wanted):
            taken = max(0, min(more, room))
            base[i] += taken
            room -= taken
        return tuple(base)

    def _output(self, sequence: Sequence, num_choices: int) -> int:
        """A window a choice, and copies of the partial page."""
        left = sequence.group.max_length - sequence.num_tokens
        window = max(0, min(self.output_window_tokens, left))
        growth = pages_of(sequence.num_tokens + window) - pages_of(sequence.num_tokens)
        copies = (num_choices - 1) if sequence.num_tokens % PAGE_TOKENS else 0
        return growth * num_choices + copies

    def _for_prefill(self, group: PageGroup, num_tokens: int) -> int:
        return _seen_at_most(group, num_tokens, self.max_chunk_tokens)

    def _num_pages_at_most(self, num_blocks: int) -> int:
        num_tokens = num_blocks * PAGE_TOKENS
        return sum(self._for_prefill(group, num_tokens) for group in self.groups)


def _seen_at_most(group: PageGroup, num_tokens: int, chunk_tokens: int) -> int:
    """Pages that a sequence of `num_tokens` holds while it grows by `chunk_tokens` at a time."""
    if not group.window:
        return pages_of(num_tokens)
    return min(pages_of(num_tokens), pages_of(group.window + chunk_tokens - 2) + 1)
