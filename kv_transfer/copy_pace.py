"""Pauses between bursts of copies, so that these take their share of a device's time."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from paceline.kv_transfer.copy_share import TARGET_SLOWDOWN, CopyShare

_MAX_HOLD_S = 0.25  # for a quiet step: the batch may have ended
_MAX_PAUSE_S = 0.25  # a burst that something else held up tells nothing of the next


class CopyPace:
    """Thread-safe. `is_busy` tells whether a batch is computed; its steps are told here."""

    def __init__(
        self, is_busy: Callable[[], bool] = lambda: False, target: float = TARGET_SLOWDOWN
    ) -> None:
        self.is_busy = is_busy
        self._share = CopyShare(target)
        self._turn = threading.Lock()  # of a burst
        self._next_turn = 0.0
        self._changed = threading.Condition()  # of what is below, and of the share
        self._num_wanted = 0  # bursts that run or wait
        self._is_copying = False
        self._copied_until = 0.0

    @property
    def share(self) -> float:
        return self._share.share

    def burst(self, copy: Callable[[], float]) -> None:
        """Calls `copy`, which returns the seconds that it took on the device: no two at a time,
        and none before the pause after the last."""
        with self._wanted(), self._turn:
            self._await_turn()
            pause_s = 0.0
            try:
                pause_s = min(copy() * (1 / self.share - 1), _MAX_PAUSE_S)
            finally:
                with self._changed:
                    self._is_copying = False
                    self._copied_until = time.monotonic()
                    self._next_turn = self._copied_until + pause_s

    @contextlib.contextmanager
    def _wanted(self) -> Iterator[None]:
        with self._changed:
            self._num_wanted += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_wanted -= 1

    def step_ended(self, seconds: float, num_sequences: int) -> None:
        """One that only decoded `num_sequences`, just now: how long it took."""
        with self._changed:
            started = time.monotonic() - seconds
            is_quiet = not self._is_copying and self._copied_until <= started
            is_wanted = self._num_wanted > 0
            self._share.step_ended(seconds, num_sequences, is_quiet=is_quiet, is_wanted=is_wanted)
            if is_quiet:
                self._changed.notify_all()

    def _await_turn(self) -> None:
        with self._changed:
            held_until = max(self._next_turn, time.monotonic() + _MAX_HOLD_S)
            while True:
                holds = self._share.holds and self.is_busy()
                left = (held_until if holds else self._next_turn) - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._share.holds = False  # once it is over nobody waits again before a step is told
            self._is_copying = True
