"""Settings of one engine."""

from dataclasses import dataclass

from paceline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds of one rank's engine. Raises ConfigError for values that cannot work."""

    max_batch_tokens: int = 512  # new tokens of one step: decodes first, then prefill chunks
    max_running: int = 64  # sequences in the batch
    step_time_ms: float = 200.0  # of steps with prefill, see step_time.py
    itl_target_ms: float = 0.0  # of streams beside which prompts are computed; 0: none
    output_window_tokens: int = 256  # promised to every request that decodes here
    prefix_cache: bool = True  # reuse committed pages of earlier requests
    max_waiting: int = 1024
    max_pinned_share: float = 0.5  # of the pool, pinned by readers and used by no request here
    cuda_graphs: bool = True  # replay pure decode steps (cuda only)
    overlap: bool | None = None  # launch a step while another runs; None: unless on the CPU

    def __post_init__(self) -> None:
        _positive("max_running", self.max_running)
        _positive("max_waiting", self.max_waiting)
        _positive("step_time_ms", self.step_time_ms)
        if not self.itl_target_ms >= 0:
            raise ConfigError("itl_target_ms", self.itl_target_ms, "must not be negative")
        if self.max_batch_tokens <= self.max_running:
            reason = f"must exceed max_running={self.max_running}, or prompts starve"
            raise ConfigError("max_batch_tokens", self.max_batch_tokens, reason)
        if self.output_window_tokens < 0:
            raise ConfigError("output_window_tokens", self.output_window_tokens, "is negative")
        if not 0 < self.max_pinned_share <= 1:
            raise ConfigError("max_pinned_share", self.max_pinned_share, "must lie in (0, 1]")


def _positive(field: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(field, value, "must be positive")
