"""Whether the step loop of a rank gets on: by its outputs, and by its time on the CPU."""

import os
from pathlib import Path

from paceline.engine.messages import StepOutput

MAX_STEP_S = 60.0  # on the CPU: a loop that spins for ever is taken for a long step as long
COMPUTING_S = 0.02  # of CPU time in a beat: it computes; one that hangs uses none
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class RankWatch:
    """Told of each output, and of each beat after the Ping that goes with it.

    `rounds` rises with each step that ends, with each answer while nothing runs, and on the CPU
    with each beat in which the main thread of `pid` has computed. On a device it also spins while
    it waits for one that hangs, and what takes long there, compiling kernels, it has done before
    the rank was ready: nobody watches until then.
    """

    def __init__(self, beat_s: float, pid: int, *, on_cpu: bool) -> None:
        self.rounds = 0
        self._beat_s = beat_s
        self._on_cpu = on_cpu
        self._stat = Path(f"/proc/{pid}/task/{pid}/stat")
        self._cpu_s = 0.0
        self._step = 0
        self._num_quiet = 0  # beats without a round
        self._num_long = 0  # beats of the step under way

    @property
    def quiet_s(self) -> float:
        """How long there was no round, in beats of ours: a pause of this process does not count."""
        return self._num_quiet * self._beat_s

    def hear(self, output: StepOutput) -> None:
        has_stepped = output.step != self._step
        if has_stepped or (output.is_progress and not output.load.num_running):
            self._step = output.step
            self._num_long = 0
            self._note_round()

    def beat(self) -> None:
        self._num_quiet += 1
        self._num_long += 1
        may_be_long = self._on_cpu and self._num_long * self._beat_s < MAX_STEP_S
        if self._has_computed() and may_be_long:
            self._note_round()

    def _note_round(self) -> None:
        self.rounds += 1
        self._num_quiet = 0

    def _has_computed(self) -> bool:
        """Since the last call."""
        before, self._cpu_s = self._cpu_s, cpu_time_s(self._stat)
        return self._cpu_s - before >= COMPUTING_S


def cpu_time_s(stat: Path) -> float:
    """User and system time in a `stat` of /proc; 0 when it is gone."""
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) * _TICK_S
