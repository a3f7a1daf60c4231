"""Messages of one piece through UCX: what is in flight of them, and what has completed.

Everything here runs in the thread of `ucx_worker`, but for the fields that others read.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

WINDOW = 8  # messages in flight of one piece; measured with 2 MiB: more gains nothing

Request = Any  # ucxx ships no types


class UcxTransfer:
    """One message a part, in order. `num_done` rises; `error` ends it."""

    def __init__(self, parts: Sequence[memoryview], first_tag: int) -> None:
        self.parts = parts
        self.first_tag = first_tag
        self.num_done = 0
        self.error = ""

    @property
    def is_over(self) -> bool:
        return bool(self.error) or self.num_done == len(self.parts)


class Flight:
    """A transfer's requests to UCX."""

    def __init__(self, transfer: UcxTransfer, post: Callable[[memoryview, int], Request]) -> None:
        self.transfer = transfer
        self._post = post
        self._requests: deque[Request] = deque()
        self._num_posted = 0

    def advance(self) -> bool:
        """Takes what has completed and posts what comes next. Whether it did anything: what was
        posted may have completed at once.

        Raises UCX's error of a message that failed.
        """
        transfer = self.transfer
        before = transfer.num_done, self._num_posted
        while self._requests and self._requests[0].completed:
            self._requests.popleft().check_error()
            transfer.num_done += 1
        end = min(len(transfer.parts), transfer.num_done + WINDOW)
        while self._num_posted < end:
            i = self._num_posted
            self._requests.append(self._post(transfer.parts[i], transfer.first_tag + i))
            self._num_posted += 1
        return (transfer.num_done, self._num_posted) != before

    @property
    def num_in_flight(self) -> int:
        """Parts that UCX may still read or write."""
        return sum(not request.completed for request in self._requests)
