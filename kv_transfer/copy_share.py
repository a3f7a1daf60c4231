"""The share of a device's time that copies may take beside a batch, for a target slow-down.

Steps of the batch while something is copied are compared with quiet ones, into which no copy fell.
The share rises while they lose less than the target on average, and falls while they lose more.
Where no step is quiet by itself, copies hold back for one now and then, and whenever the batch has
become another. Only steps that decode and nothing else are alike enough to be told.
"""

TARGET_SLOWDOWN = 0.1  # of a decode step
FIRST_SHARE = 0.16  # what costs 8 to 9 % on an H200
LEAST_SHARE, MOST_SHARE = 0.02, 0.6
_GAIN = 0.02  # a step: some fifty of them decide
_MAX_ERROR = 3.0  # of the target: a step that waited for something else counts no more than this
_QUIET_WEIGHT = 0.25  # of the newest quiet step
_QUIET_EVERY = 40  # steps; sooner after the first one, which alone says little
_QUIET_AGAIN = 8
_BATCH_CHANGE = 1 / 16  # from here on a quiet step of before says nothing


class CopyShare:
    """Not thread-safe. `holds`: copies shall wait, so that a step is quiet."""

    def __init__(self, target: float = TARGET_SLOWDOWN) -> None:
        self.target = target
        self.share = FIRST_SHARE
        self.holds = False
        self._quiet_s = 0.0  # a quiet step; 0: not known
        self._num_sequences = 0  # of it
        self._steps_until_quiet = 0

    def step_ended(
        self, seconds: float, num_sequences: int, *, is_quiet: bool, is_wanted: bool
    ) -> None:
        """`is_wanted`: there is something to copy, whether or not it fell into this step."""
        is_known = self._is_known(num_sequences)
        if is_wanted and is_known:
            self._adapt(seconds)
        if is_quiet:
            self._learn_quiet(seconds, num_sequences)
        elif not is_known:
            self.holds = True

    def _is_known(self, num_sequences: int) -> bool:
        change = abs(num_sequences - self._num_sequences)
        return self._quiet_s > 0 and change <= _BATCH_CHANGE * self._num_sequences

    def _learn_quiet(self, seconds: float, num_sequences: int) -> None:
        if self._is_known(num_sequences):
            self._quiet_s += _QUIET_WEIGHT * (seconds - self._quiet_s)
            self._steps_until_quiet = _QUIET_EVERY
        else:
            self._quiet_s, self._num_sequences = seconds, num_sequences
            self._steps_until_quiet = _QUIET_AGAIN
        self.holds = False

    def _adapt(self, seconds: float) -> None:
        slowdown = seconds / self._quiet_s - 1
        error = (self.target - slowdown) / self.target
        error = max(-_MAX_ERROR, min(_MAX_ERROR, error))
        share = self.share * (1 + _GAIN * error)
        self.share = max(LEAST_SHARE, min(MOST_SHARE, share))
        self._steps_until_quiet -= 1
        self.holds = self._steps_until_quiet <= 0
