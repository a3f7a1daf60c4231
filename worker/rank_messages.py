"""What crosses ZeroMQ between front and rank beside the engine's own messages.

The rank sends [kind, payload, time in µs] frames: one READY or FAILED, then a STEP for each engine
step and each Ping, and a LINK for each LinkCall. The front sends commands, one a frame.
"""

import msgspec

from paceline.core.errors import ErrorCode
from paceline.core.kv_layout import HeadRange, PageGroup
from paceline.engine.messages import Command
from paceline.worker.config import ComputeSettings, StepSettings

READY = b"ready"
FAILED = b"failed"
STEP = b"step"
LINK = b"link"


class RankConfig(msgspec.Struct, frozen=True):
    """All that a rank process needs; arrives on its standard input."""

    model: str
    compute: ComputeSettings
    steps: StepSettings
    incarnation: str
    transports: tuple[str, ...]  # that the rank itself serves: empty for a pool in host memory
    pool_fd: int
    max_waiting: int
    max_pinned_share: float
    command_address: str
    step_address: str
    pool_address: str


class CanaryPages(msgspec.Struct, frozen=True, array_like=True):
    """The last pages of the pool (engine/canary.py)."""

    own: tuple[int, ...]
    arrivals: tuple[int, ...]
    scratch: int
    checksums: list[tuple[int, ...]]  # of the own ones


class RankReady(msgspec.Struct, frozen=True):
    """The model is loaded, the pool laid out, and what a device compiles is compiled."""

    content_digest: str
    content_parts: dict[str, str]
    layout_digest: str
    serving_digest: str
    context_length: int
    vocab_size: int
    hidden_size: int
    groups: tuple[PageGroup, ...]
    layers: tuple[tuple[int, int], ...]  # as KVLayout has it
    ranks: tuple[HeadRange, ...]
    num_pages: int
    page_bytes: int
    most_pages: tuple[int, ...]  # of a sequence, by page group; 0: no bound but its length
    addresses: tuple[tuple[str, bytes], ...]  # of the rank's sources, by transport
    canary: CanaryPages

    @property
    def num_all_pages(self) -> int:
        """Of a rank's memory: more than requests are given."""
        return self.canary.scratch + 1


class RankFailed(msgspec.Struct, frozen=True):
    """Loading failed; the process ends."""

    code: ErrorCode
    message: str
    field: str | None = None


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered by a StepOutput from the step loop, so that a stall shows."""


# --- links of a pool on a device: only the rank can copy into it --------------------------------


class ConnectLink(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Makes a link. It is known by the number of this call from then on."""

    number: int
    transport: str
    address: bytes
    timeout_s: float


class ReadLink(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reads one piece."""

    number: int
    link: int
    source_pages: bytes  # int64 each
    destination_pages: bytes
    num_tokens: int | None
    timeout_s: float


class CloseLink(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    link: int


LinkCall = ConnectLink | ReadLink | CloseLink


class LinkFailure(msgspec.Struct, frozen=True, array_like=True):
    """An error of kv_transfer/base.py's contract."""

    kind: str  # its class
    message: str
    field: str | None


class LinkReply(msgspec.Struct, frozen=True, array_like=True):
    """Each LinkCall has one, in any order."""

    number: int
    sums: bytes = b""  # of a ReadLink: uint64 [pages, heads]
    failure: LinkFailure | None = None


RankCommand = Command | Ping | LinkCall
