"""A Listener that remembers."""

from typing import Any

from paceline.core.errors import PacelineError


class Heard:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_emission(self, flight: Any, emission: Any) -> None:
        self.calls.append(("emission", list(emission.token_ids)))

    def on_reserved(self, flight: Any, num_cached_tokens: int) -> None:
        self.calls.append(("reserved", num_cached_tokens))

    def on_moved(self, flight: Any) -> None:
        self.calls.append(("moved", None))

    def on_busy(self, flight: Any) -> None:
        self.calls.append(("busy", None))

    def on_ended(self, flight: Any) -> None:
        self.calls.append(("ended", None))

    def on_error(self, flight: Any, error: PacelineError) -> None:
        self.calls.append(("error", error.code))
