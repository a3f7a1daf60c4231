"""Who is left alone for a while, and who is not."""

import pytest

from paceline.core.errors import KvUnavailable
from paceline.worker import quarantine
from paceline.worker.quarantine import FIRST_S, STRIKES, WITHIN_S, Quarantine, Verdict

KEY = ("prefill-1", "incarnation-1")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def judge(held: Quarantine, verdict: Verdict, times: int = STRIKES) -> bool:
    verdicts = [held.judge(KEY, verdict) for _ in range(times)]
    return True in verdicts


@pytest.mark.parametrize("verdict", [Verdict.SOURCE, Verdict.SILENT])
def test_a_source_that_confirms_or_is_silent_is_left_for_a_while(verdict: Verdict) -> None:
    clock = Clock()
    held = Quarantine(clock)
    assert not judge(held, verdict, STRIKES - 1)
    held.refuse(KEY)
    assert held.judge(KEY, verdict)
    with pytest.raises(KvUnavailable):
        held.refuse(KEY)
    held.refuse(("prefill-1", "incarnation-2"))
    assert len(held) == 1
    clock.now += FIRST_S
    held.refuse(KEY)
    assert len(held) == 0


@pytest.mark.parametrize("verdict", [Verdict.LINK, Verdict.GONE])
def test_a_bad_link_or_a_reused_page_speaks_against_nobody(verdict: Verdict) -> None:
    held = Quarantine()
    assert not judge(held, verdict, 100)
    held.refuse(KEY)


def test_strikes_that_lie_far_apart_do_not_add_up() -> None:
    clock = Clock()
    held = Quarantine(clock)
    for _ in range(10):
        assert not held.judge(KEY, Verdict.SOURCE)
        clock.now += WITHIN_S / (STRIKES - 1) + 1


def test_each_stay_is_longer_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "LONGEST_S", 3 * FIRST_S)
    clock = Clock()
    held = Quarantine(clock)
    for seconds in (FIRST_S, 2 * FIRST_S, 3 * FIRST_S, 3 * FIRST_S):
        assert judge(held, Verdict.SOURCE)
        assert not judge(held, Verdict.SOURCE), "those of pulls that were under way count once"
        clock.now += seconds - 0.1
        assert held.holds(KEY)
        clock.now += 0.2
        assert not held.holds(KEY)


def test_it_remembers_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_SOURCES", 4)
    held = Quarantine()
    for number in range(50):
        held.judge((f"worker-{number}", "1"), Verdict.SOURCE)
    assert len(held._records) == 4
