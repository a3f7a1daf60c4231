"""What crosses ZeroMQ between front and rank beside the engine's own messages.

The rank sends [kind, payload, time in µs] frames: one READY or FAILED, then a STEP for each engine
step and each Ping. The front sends commands, one a frame.
"""

import msgspec

from paceline.core.errors import ErrorCode
from paceline.core.kv_layout import PageGroup
from paceline.engine.messages import Command

READY = b"ready"
FAILED = b"failed"
STEP = b"step"


class RankConfig(msgspec.Struct, frozen=True):
    """All that a rank process needs; arrives on its standard input."""

    parent_pid: int
    model: str
    device: str
    dtype: str
    quantization: str
    pool_fd: int
    pool_bytes: int
    max_batch_tokens: int
    max_running: int
    output_window_tokens: int
    step_time_ms: float
    num_threads: int
    max_waiting: int
    max_pinned_share: float
    command_address: str
    step_address: str
    pool_address: str


class RankReady(msgspec.Struct, frozen=True):
    """The model is loaded and the pool laid out."""

    content_digest: str
    layout_digest: str
    serving_digest: str
    context_length: int
    vocab_size: int
    groups: tuple[PageGroup, ...]
    num_pages: int
    page_bytes: int
    most_pages: tuple[int, ...]  # of a sequence, by page group; 0: no bound but its length


class RankFailed(msgspec.Struct, frozen=True):
    """Loading failed; the process ends."""

    code: ErrorCode
    message: str
    field: str | None = None


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered by a StepOutput from the step loop, so that a stall shows."""


RankCommand = Command | Ping
