"""What takes a gateway's requests: a router, or an engine in the same process."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from paceline.gateway.mailbox import Mailbox
from paceline.v1.common_pb2 import TokenRequest
from paceline.v1.control_pb2 import ModelInfo


class Router(Protocol):
    """Start, submit and cancel, stop; all on one event loop."""

    @property
    def is_attached(self) -> bool:
        """Whether it takes requests now."""
        ...

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        """By name, as last known."""
        ...

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    def submit(self, request: TokenRequest, mailbox: Mailbox) -> int:
        """Takes a request; its emissions go to `mailbox`, and so does its failure. Returns the
        slot, which names it. Raises PacelineError."""
        ...

    def cancel(self, slot: int, choices: Sequence[int] = ()) -> None:
        """Ends some choices of a slot or, without `choices`, the slot."""
        ...

    def forget(self, slot: int) -> None:
        """A slot all of whose choices have ended there."""
        ...
