"""A step loop that hangs is told from one that computes, rests or starves."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.engine.messages import Load, StepOutput
from paceline.worker.rank_watch import COMPUTING_S, MAX_STEP_S, RankWatch, cpu_time_s

NOBODY = 1 << 30  # no process has this number


def _watch(pid: int) -> RankWatch:
    return RankWatch(1.0, pid, on_cpu=True)


def _output(step: int, *, running: int = 0, is_progress: bool = True) -> StepOutput:
    return StepOutput(step, [], Load(running, 3, 0, 10, 10, 0), is_progress)


@contextmanager
def _process(work: str) -> Iterator[int]:
    """That has started, and does its work."""
    code = f"print(flush=True)\n{work}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def _let_compute(pid: int) -> None:
    """As long as it takes on this machine until a watch must see it."""
    stat = Path(f"/proc/{pid}/task/{pid}/stat")
    before, deadline = cpu_time_s(stat), time.monotonic() + 30
    while cpu_time_s(stat) - before < 2 * COMPUTING_S:
        assert time.monotonic() < deadline, "it does not run"
        time.sleep(0.01)


def test_beats_without_an_answer_add_up_until_a_round() -> None:
    watch = RankWatch(0.5, NOBODY, on_cpu=True)
    for _ in range(3):
        watch.beat()
    assert (watch.quiet_s, watch.rounds) == (1.5, 0)
    watch.hear(_output(1, running=2))
    assert (watch.quiet_s, watch.rounds) == (0, 1)


def test_answers_of_a_loop_that_has_nothing_to_run_are_rounds() -> None:
    watch = _watch(NOBODY)
    for _ in range(100):
        watch.beat()
        watch.hear(_output(0))
    assert (watch.quiet_s, watch.rounds) == (0, 100)


def test_answers_beside_a_loop_that_hangs_are_none() -> None:
    watch = _watch(NOBODY)
    for _ in range(10):
        watch.beat()
        watch.hear(_output(0, is_progress=False))  # to a command, by another thread
        watch.hear(_output(0, running=1))  # has work and does not do it
    assert (watch.quiet_s, watch.rounds) == (10, 0)


def test_a_long_step_on_the_cpu_is_no_hang_and_a_sleep_is_one() -> None:
    with _process("while True: pass") as busy, _process("import time; time.sleep(60)") as idle:
        computing, hanging = _watch(busy), _watch(idle)
        for _ in range(4):
            _let_compute(busy)
            computing.beat()
            hanging.beat()
        assert computing.quiet_s == 0 and computing.rounds == 4
        assert hanging.quiet_s >= 3


def test_on_a_device_a_loop_that_spins_is_a_hang_from_the_first_step_on() -> None:
    """It has compiled its kernels before it was ready."""
    with _process("while True: pass") as busy:
        watch = RankWatch(1.0, busy, on_cpu=False)
        for _ in range(2):
            _let_compute(busy)
            watch.beat()
        assert (watch.rounds, watch.quiet_s) == (0, 2)


def test_a_loop_that_spins_for_ever_is_a_hang_in_the_end() -> None:
    with _process("while True: pass") as busy:
        watch = RankWatch(MAX_STEP_S / 2, busy, on_cpu=True)
        for _ in range(3):
            _let_compute(busy)
            watch.beat()
        assert watch.rounds == 1 and watch.quiet_s == MAX_STEP_S


def test_a_process_that_is_gone_computes_nothing() -> None:
    with _process("pass") as pid:
        pass
    watch = _watch(pid)
    watch.beat()
    assert (watch.rounds, watch.quiet_s) == (0, 1)
