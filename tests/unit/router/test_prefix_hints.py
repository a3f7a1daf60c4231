"""Who is named as a holder of a prefix, and how far plans count on what workers pull."""

import random

import pytest

from paceline.router.planner import Candidate, Job, Split, plan
from paceline.router.prefix_hints import MAX_HINTS, PullYield, hints_for
from paceline.router.worker_session import WorkerSession
from paceline.v1 import worker_pb2


def session(worker_id: str, num_running: int = 0) -> WorkerSession:
    made = WorkerSession(worker_pb2.WorkerInfo(worker_id=worker_id), 0.0)
    made.num_running = num_running
    return made


def test_the_best_holders_are_named_first() -> None:
    few, busy, idle, lost = session("few"), session("busy", 5), session("idle"), session("lost")
    lost.lost = "closed"
    holders = [(few, 4), (busy, 9), (lost, 20), (idle, 9)]
    hints = hints_for(3, holders)
    assert [hint.source.worker_id for hint in hints] == ["idle", "busy", "few"]
    assert [(hint.num_blocks, hint.num_own_blocks) for hint in hints] == [(9, 3), (9, 3), (4, 3)]
    many = [(session(str(i)), 5 + i) for i in range(10)]
    assert [hint.num_blocks for hint in hints_for(0, many)] == [14, 13, 12][:MAX_HINTS]


def test_plans_count_on_pulls_as_far_as_workers_make_them() -> None:
    hints = hints_for(2, [(session("d0"), 12)])
    pulls = PullYield()
    assert pulls.spared({"p0": 32}, ["p0", "p1"], 192) == {"p0": 32}, "nothing is known"
    for _ in range(60):
        pulls.observe(hints, 16 * 12)
    assert pulls.share == pytest.approx(1, abs=0.01)
    spared = pulls.spared({"p0": 32}, ["p0", "p1"], 192)
    assert spared["p0"] == pytest.approx(32 + 0.875 * 160, abs=3)
    assert spared["p1"] == pytest.approx(0.875 * 192, abs=3)
    for _ in range(60):
        pulls.observe(hints, 16 * 2)
    assert pulls.share == pytest.approx(0, abs=0.01)
    pulls.observe((), 500)
    pulls.observe(hints, 16 * 40)  # it had more itself than the index told
    assert pulls.share <= 0.2


def test_a_prefix_that_can_be_pulled_goes_to_who_is_idle() -> None:
    """Its holder has so much to do that computing all of it elsewhere would be slower still."""
    holder = Candidate("p0", True, num_waiting_tokens=600)
    idle, decode = Candidate("p1", True), Candidate("d0", False)
    job, cached = Job(1000, 8), {holder: 900}
    rng = random.Random(0)
    alone = plan(job, [holder, idle], [decode], cached, 32, rng)
    assert isinstance(alone, Split) and alone.prefill.worker_id == "p0"
    pulls = PullYield()
    pulls.share = 1.0
    spared = pulls.spared(cached, [holder, idle], 900)
    found = plan(job, [holder, idle], [decode], cached, 32, rng, spared)
    assert isinstance(found, Split) and found.prefill.worker_id == "p1"
