"""A request in the engine: a group, and one sequence for each of its choices.

Until the first logits row there is one sequence, the leader, that stands for all choices; then it
is forked. Forked sequences refer to the same full pages; each has partial last pages of its own.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.keys import chain_keys
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.block_table import BlockTable
from paceline.engine.messages import RequestSpec
from paceline.engine.pooling import PooledStates
from paceline.engine.request_edits import RequestEdits
from paceline.engine.token_counts import TokenCounts

if TYPE_CHECKING:
    from paceline.engine.refusal import Refusal


class Stage(Enum):
    """Where a sequence is. Only a RUNNING one has a row in the batch."""

    WAITING = "waiting"  # for pages, or with pages for a row
    RUNNING = "running"
    WAITING_FOR_KV = "waiting for kv"  # pages granted, a transfer fills them
    HELD = "held"  # prefilled here, kept for its reader
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Group:
    """One slot. `choices` are those still wanted; sequences are keyed by choice after the fork."""

    slot: int
    spec: RequestSpec
    arrival: int
    prefill_only: bool
    choices: list[int]
    stop_ids: tuple[int, ...]  # end a choice
    max_length: int  # tokens, prompt included, at which a choice ends
    edits: RequestEdits | None = None
    pooled: PooledStates | None = None  # wanted instead of tokens
    leader: "Sequence | None" = None
    sequences: list["Sequence"] = field(default_factory=list)
    num_scored: int = 0  # leading tokens of the prompt whose logits were scored, or need not be
    num_cached_tokens: int = -1  # -1: not admitted yet
    num_announced: int = 0  # committed blocks, prefill-only
    num_offered: int = 0  # leading blocks that can be filled from outside; 0 once it was tried
    is_kept: bool = False  # what it leaves is evicted last
    reader_lacks: list[int] | None = None  # blocks from these on, by page group; prefill-only

    @property
    def is_filling(self) -> bool:
        """A transfer may be writing into its pages."""
        return self.leader is not None and self.leader.stage is Stage.WAITING_FOR_KV

    @property
    def num_behind_offer(self) -> int:
        """Tokens to compute here if all comes that was offered."""
        assert self.leader is not None, "offers are of prompts"
        return self.leader.num_tokens - PAGE_TOKENS * self.num_offered

    def to_score(self, start: int, end: int) -> range:
        """Of tokens [start, end) those whose logits are still to be scored: each predicts the
        prompt's next token. There are none once a token was emitted."""
        last = self.spec.num_prompt_tokens - 1
        return range(max(start, self.num_scored), min(end, last))

    def to_pool(self, start: int, end: int) -> range:
        """Of tokens [start, end) those whose hidden states are still to be pooled."""
        return range(0) if self.pooled is None else self.pooled.wanted(start, end)

    @property
    def is_only_prompt(self) -> bool:
        """Nothing is generated here."""
        return self.prefill_only or self.pooled is not None


class Sequence:
    """Tokens, the pages of their KV by page group, and how far it is computed."""

    __slots__ = (
        "choice",
        "counts",
        "epoch",
        "group",
        "has_emitted",
        "is_granted",
        "is_promised",
        "keys",
        "num_blocks",
        "num_committed",
        "num_computed",
        "num_tokens",
        "order",
        "refusal",
        "row",
        "stage",
        "tables",
        "tokens",
    )

    def __init__(
        self,
        group: Group,
        choice: int,
        tokens: NDArray[np.int64],
        num_tokens: int,
        num_page_groups: int = 1,
    ) -> None:
        self.group = group
        self.choice = choice
        self.tokens = tokens
        self.num_tokens = num_tokens
        self.order = (group.spec.priority, group.arrival, choice)
        self.stage = Stage.WAITING
        self.epoch = 0  # rises when what is in flight for it no longer counts
        self.num_computed = 0
        self.num_committed = 0  # leading blocks that were offered to the prefix cache
        self.tables = tuple(BlockTable() for _ in range(num_page_groups))
        self.num_blocks = 0  # for which every table is long enough
        self.is_granted = False  # pages, or a promise of them
        self.keys: list[bytes] = []
        self.refusal: Refusal | None = None  # the last time that it did not fit
        self.row = -1
        self.has_emitted = False
        self.is_promised = False  # its last token is being drawn: which one, is not known yet
        self.counts: TokenCounts | None = None  # made when a penalty asks for it

    @property
    def num_known(self) -> int:
        return self.num_tokens - self.is_promised

    @property
    def num_outputs(self) -> int:
        """Known ones."""
        return self.num_known - self.group.spec.num_prompt_tokens

    @property
    def prompt(self) -> NDArray[np.int64]:
        return self.tokens[: self.group.spec.num_prompt_tokens]

    @property
    def output(self) -> NDArray[np.int64]:
        return self.tokens[self.group.spec.num_prompt_tokens : self.num_known]

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is not computed; the last of them yields the next token."""
        return self.num_tokens - self.num_computed

    def promise(self) -> None:
        """One more token will come."""
        if self.num_tokens == len(self.tokens):
            grown = np.empty(self.num_tokens * 3 // 2 + PAGE_TOKENS, np.int64)
            grown[: self.num_tokens] = self.tokens
            self.tokens = grown
        self.num_tokens += 1
        self.is_promised = True

    def append(self, token_id: int) -> None:
        """The promised token, or one that comes unannounced."""
        if not self.is_promised:
            self.promise()
        self.is_promised = False
        self.tokens[self.num_tokens - 1] = token_id
        if self.counts is not None:
            self.counts.add(token_id)

    def extend_keys(self, num_blocks: int) -> None:
        """Makes sure that the keys of the first `num_blocks` blocks are known."""
        known = len(self.keys)
        if known < num_blocks:
            parent = self.keys[-1] if known else self.group.spec.root_key
            tokens = self.tokens[known * PAGE_TOKENS : num_blocks * PAGE_TOKENS]
            self.keys.extend(chain_keys(parent, tokens))  # type: ignore[arg-type]

    def fork(self, choice: int) -> "Sequence":
        """Another choice with the same tokens and no pages yet."""
        other = Sequence(self.group, choice, self.tokens.copy(), self.num_tokens, len(self.tables))
        other.keys = list(self.keys)
        return other


def pages_of(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)
