"""How what is to be pulled is cut into ranges."""

from paceline.worker.block_runs import BlockRun
from paceline.worker.ranges import cut

RUNS = [BlockRun(0, 3, 7), BlockRun(1, 6, 7), BlockRun(2, 5, 7)]


def test_ranges_may_span_groups() -> None:
    assert cut(RUNS, 7) == (RUNS, [])
    assert cut(RUNS, 99) == (RUNS, [])
    assert cut(RUNS, 6) == ([*RUNS[:2], BlockRun(2, 5, 6)], [BlockRun(2, 6, 7)])
    assert cut(RUNS, 5) == (RUNS[:2], RUNS[2:])
    assert cut(RUNS, 1) == ([BlockRun(0, 3, 4)], [BlockRun(0, 4, 7), *RUNS[1:]])
    assert cut([], 4) == ([], [])
