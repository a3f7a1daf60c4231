"""What goes into an engine and what comes out: the only surface that a rank process exposes.

Life of a slot, by how it enters:

    Submit(prefill_only=False)   waiting → running → Emission… → Ended
    Submit(pooling is set)       waiting → running → Embedding → Ended
    Submit(prefill_only=True)    waiting → running → first Emission + HandoffReady, KV held
                                 → Release or Cancel → Ended
    Submit(num_offered_blocks>0) waiting → Fill (pages granted) → Pulled… → Filled → running → …
                                 as above; no Fill if what is offered is here already
    Reserve                      Reserved (pages granted) | Refused → Ended
                                 → Pulled… → Adopt → running → Emission… → Ended

`Cancel` is right in every state. A slot ends exactly once, with `Ended`. The pages of one that ends
between Reserved and Adopt, or Fill and Filled, stay quarantined until `TransferClosed`: a copy may
still write them.
"""

import msgspec

from paceline.core.errors import ErrorCode
from paceline.core.finish import FinishReason
from paceline.core.pooling import Pooling
from paceline.core.sampling import SamplingParams


class RequestSpec(msgspec.Struct, frozen=True, array_like=True):
    """A request in tokens. `token_ids` beyond `num_prompt_tokens` were emitted before: forced.

    `pooling`: its hidden states are wanted, and no token; there are no forced ones then."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    root_key: bytes
    sampling: SamplingParams
    choices: tuple[int, ...]  # 0..n-1 sharing the prompt, or the one that is continued
    priority: int = 0  # smaller first, then arrival
    pooling: Pooling | None = None
    itl_ms: float = 0.0  # hoped for, from token to token; 0: nothing was said


# --- commands: front → rank -------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute it here. `prefill_only`: sample the first tokens, then hold the KV for a reader.

    `num_offered_blocks`: leading blocks that can be filled from outside where they are not here."""

    slot: int
    request: RequestSpec
    prefill_only: bool = False
    num_offered_blocks: int = 0


class Reserve(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Credit for a request whose KV will be pulled: its prompt's pages and a window of output."""

    slot: int
    request: RequestSpec


class Pulled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Blocks [first_block, first_block + len(checksums)) of a page group lie verified in their
    pages."""

    slot: int
    group: int
    first_block: int
    checksums: list[list[int]]  # one list a block, one sum a KV head


class Adopt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All KV of the slot is here (tail included): join the batch after these first tokens.

    If all of them end their choice the slot ends; then nothing needs to be here."""

    slot: int
    first_tokens: list["FirstToken"]


class Filled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What could be filled of a Fill has been `Pulled`: compute the rest.

    `is_copying`: something may write into its pages still, `TransferClosed` follows. Else nothing
    does."""

    slot: int
    is_copying: bool = False


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ends choices of a slot (none named: all)."""

    slot: int
    choices: tuple[int, ...] = ()


class TransferClosed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing writes into the pages of this slot any more, which has ended before its Adopt or
    Filled, or has gone on without a copy."""

    slot: int


class Release(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The reader has it all: stop holding the KV of this prefilled slot."""

    slot: int


class Follow(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A reader follows this prefill-only slot and lacks its blocks from `first_blocks` on (by page
    group): pin those, and the tails, with its HandoffReady."""

    slot: int
    first_blocks: list[int]


class Keep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """When this prefill-only slot ends, evict what it leaves last, until LetGo."""

    slot: int


class LetGo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Of what is kept of a slot, which may have ended."""

    slot: int


Command = (
    Submit
    | Reserve
    | Pulled
    | Adopt
    | Filled
    | Cancel
    | TransferClosed
    | Release
    | Follow
    | Keep
    | LetGo
)


# --- events: rank → front ---------------------------------------------------------------------


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    choice: int
    token_id: int
    finish: FinishReason | None = None


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position; `top` holds (token id, logprob), best first.

    `rank`: how many tokens are at least as likely as this one; 0: not counted."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0


class Emission(msgspec.Struct, frozen=True, tag=True, array_like=True):
    slot: int
    choice: int
    position: int  # of token_ids[0], counted from the first output token
    token_ids: list[int]
    logprobs: list[PositionLogprobs] = []
    finish: FinishReason | None = None
    num_cached_tokens: int = 0


class PromptScored(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Log-probabilities of the prompt's tokens from `first_position` on. The parts of a slot come
    in order, before its first Emission; the prompt's first token has none."""

    slot: int
    first_position: int
    scores: list[PositionLogprobs]


class Embedding(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Pooled hidden states of a prompt, as the model has them: not normalised."""

    slot: int
    vector: bytes  # float32, little-endian
    num_cached_tokens: int


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The slot cannot go on. `Ended` follows when its pages are free."""

    slot: int
    code: ErrorCode
    message: str
    field: str | None = None


class Committed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first `num_blocks` blocks of a prefill-only slot are committed and can be pinned: in a
    group with a window those of them that the end of its prompt sees."""

    slot: int
    num_blocks: int


class HandoffReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Prompt done: all its KV is held, `num_tokens` of it, the last block perhaps partial.

    `rest`: what a reader that follows lacks of it, pinned already; none where that is much."""

    slot: int
    num_tokens: int
    first_tokens: list[FirstToken]
    rest: "Pinned | None" = None


class GrantedRun(msgspec.Struct, frozen=True, array_like=True):
    """Destination pages for blocks [first_block, …), the partial last one included."""

    first_block: int
    pages: list[int]


class Reserved(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`runs`: by page group, of the blocks that the end of the prompt sees those that are not here;
    for the first `num_cached_blocks` blocks nothing is missing."""

    slot: int
    num_cached_blocks: int
    runs: list[GrantedRun]


class Fill(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Destination pages of the offered blocks that are not here, by page group. The slot waits,
    with its pages and without a row, until it is `Filled`."""

    slot: int
    runs: list[GrantedRun]


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No credit now: of pages, or of rows in the batch. Errors of the request are `Failed`."""

    slot: int
    num_pages_needed: int
    num_pages_free: int


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    slot: int


class Stored(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Blocks that can now be found by name, for the index. Of the first page group alone: whether
    the others have them too is found out where they are used."""

    keys: list[bytes]


class Removed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    keys: list[bytes]


Event = (
    Emission
    | PromptScored
    | Embedding
    | Failed
    | Committed
    | HandoffReady
    | Reserved
    | Fill
    | Refused
    | Ended
    | Stored
    | Removed
)


class Load(msgspec.Struct, frozen=True, array_like=True):
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_pages: int  # free, or cached and evictable, less what is promised or waited for
    num_pages: int
    num_preemptions: int
    token_s: float = 0.0  # that a prompt token takes, on average of late; 0: not known yet
    num_deferred: int = 0  # of those that wait: for KV from outside


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """Everything that changed since the last output, in order.

    `is_progress`: the step loop itself has moved since then, or answers a ping. Commands are
    answered beside it, so an output alone does not show that it lives.
    """

    step: int  # steps that have ended: stands still while the loop hangs
    events: list[Event]
    load: Load
    is_progress: bool


# --- the pool channel: answered at once by a thread of its own, never in the step loop -----------


class KeyRun(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one page group, in the order of their chain."""

    group: int
    keys: list[bytes]


class Pin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Pin what leads of each run and is here; `tail_slot`: its partial pages too."""

    runs: list[KeyRun]
    tail_slot: int | None = None


class Unpin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pages: list[tuple[int, int]]  # (page, generation)


class Recheck(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A reader got wrong bytes from this page: hash it again and drop it if it is wrong here."""

    page: int
    generation: int


class CheckIntegrity(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Prove that the states of all pages sum to the pool; looks at some pages more each time."""


class CompareCanary(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compare the canary that has arrived with our own (engine/canary.py)."""


PoolCall = Pin | Unpin | Recheck | CheckIntegrity | CompareCanary


class PinnedPage(msgspec.Struct, frozen=True, array_like=True):
    page: int
    generation: int
    checksums: list[int]  # one a KV head


class Pinned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    runs: list[list[PinnedPage]]
    tails: list[PinnedPage] = []  # one a page group
    num_tail_tokens: int = 0

    @property
    def pages(self) -> list[PinnedPage]:
        """All that is pinned."""
        return [page for run in [*self.runs, self.tails] for page in run]


class Unpinned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Pins of another life of their page were passed over."""


class Rechecked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    dropped: bool
    known: bool  # whether the page still was what the reader had pinned


class CanaryCompared(msgspec.Struct, frozen=True, tag=True, array_like=True):
    distance: float  # Canary.distance
    tolerance: float


class Integrity(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Pages by state; `problem` is empty while the books balance, and stays. `is_round`: with this
    call the last page was looked at, too."""

    num_free: int
    num_mapped: int
    num_cached: int
    num_pinned: int
    num_quarantined: int
    is_round: bool
    problem: str = ""


PoolReply = Pinned | Unpinned | Rechecked | Integrity | CanaryCompared
