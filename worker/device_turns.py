"""Leaves a device to the prompts that a worker on it computes, as long as requests here wait for
their KV.

Processes on one device take turns by slices of time, whatever they have to do: a batch that decodes
without a pause takes as much of the device as the prompts, and the requests that wait for them
start later than they need to. So meanwhile a step begins no sooner than some time after the one
before.
"""

import time
from collections.abc import Callable

INTERVAL_S = 0.03  # at most


class DeviceTurns:
    """`is_shared`: another process computes on the device; `awaits_kv`: requests wait for KV."""

    def __init__(
        self, is_shared: Callable[[], bool], awaits_kv: Callable[[], bool], itl_target_s: float
    ) -> None:
        """`itl_target_s`: of the latency between tokens; 0: none."""
        self._is_shared = is_shared
        self._awaits_kv = awaits_kv
        self._interval_s = min(INTERVAL_S, itl_target_s or INTERVAL_S)
        self._next_s = 0.0

    def gives_way(self) -> bool:
        return self._is_shared() and self._awaits_kv()

    def wait(self) -> None:
        """Before each step."""
        left_s = self._next_s - time.monotonic()
        if left_s > 0 and self.gives_way():
            time.sleep(left_s)
        self._next_s = time.monotonic() + self._interval_s
