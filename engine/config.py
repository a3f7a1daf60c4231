"""Settings of one engine."""

from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import PAGE_TOKENS, KVLayout


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds of one rank's engine. Raises ConfigError for values that cannot work."""

    num_pages: int = 0  # of the pool; 0: as many as pool_bytes holds
    pool_bytes: int = 0
    max_batch_tokens: int = 512  # new tokens of one step: decodes first, then prefill chunks
    max_running: int = 64  # sequences in the batch
    step_time_ms: float = 200.0  # prefill chunks are cut so that a step takes no longer
    output_window_tokens: int = 256  # promised to every request that decodes here
    prefix_cache: bool = True  # reuse committed pages of earlier requests
    max_waiting: int = 1024
    max_pinned_share: float = 0.5  # of the pool, pinned by readers and used by no request here
    device: str = "cpu"
    cuda_graphs: bool = True  # replay pure decode steps (cuda only)

    def __post_init__(self) -> None:
        _positive("num_pages", self.num_pages or self.pool_bytes)
        _positive("max_running", self.max_running)
        _positive("max_waiting", self.max_waiting)
        _positive("step_time_ms", self.step_time_ms)
        if self.max_batch_tokens <= self.max_running:
            reason = f"must exceed max_running={self.max_running}, or prompts starve"
            raise ConfigError("max_batch_tokens", self.max_batch_tokens, reason)
        if self.output_window_tokens < 0:
            raise ConfigError("output_window_tokens", self.output_window_tokens, "is negative")
        if not 0 < self.max_pinned_share <= 1:
            raise ConfigError("max_pinned_share", self.max_pinned_share, "must lie in (0, 1]")

    def pages_for(self, layout: KVLayout) -> int:
        """Pages of the pool: as configured, else what fits in `pool_bytes`."""
        if self.num_pages:
            return self.num_pages
        page_bytes = sum(group.page_bytes for group in layout.groups)
        if self.pool_bytes < page_bytes:
            reason = f"holds no page: one of {PAGE_TOKENS} tokens takes {page_bytes} bytes"
            raise ConfigError("pool_bytes", self.pool_bytes, reason)
        return self.pool_bytes // page_bytes


def _positive(field: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(field, value, "must be positive")
