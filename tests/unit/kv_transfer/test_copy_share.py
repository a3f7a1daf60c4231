"""The share of copies beside a simulated batch, whose steps take longer the more is copied."""

import random

import pytest

from paceline.kv_transfer.copy_share import LEAST_SHARE, MOST_SHARE, CopyShare


class Batch:
    """A step takes `quiet_s`, and longer by what a burst costs if one falls into it: the larger
    the share the more often one does, and all together cost `cost` times the share."""

    def __init__(self, cost: float, noise: float = 0.02, quiet_s: float = 0.007) -> None:
        self.cost, self.noise, self.quiet_s = cost, noise, quiet_s
        self.num_sequences = 64
        self.num_held = 0
        self._chance = random.Random(1)

    def run(self, share: CopyShare, num_steps: int, *, copies: bool = True) -> float:
        """The mean slow-down."""
        slowdowns = []
        for _ in range(num_steps):
            slowdown, mean = 0.0, self.cost * share.share
            if copies and not share.holds:
                burst = max(mean, 0.1)
                slowdown = burst if self._chance.random() < mean / burst else 0.0
            seconds = self.quiet_s * (1 + slowdown) * self._chance.gauss(1, self.noise)
            is_quiet = slowdown == 0
            share.step_ended(seconds, self.num_sequences, is_quiet=is_quiet, is_wanted=copies)
            self.num_held += share.holds
            slowdowns.append(slowdown)
        return sum(slowdowns) / len(slowdowns)


@pytest.mark.parametrize("cost", [0.2, 0.56, 2.0])
def test_the_share_follows_what_copies_cost(cost: float) -> None:
    share, batch = CopyShare(target=0.09), Batch(cost)
    batch.run(share, 400)
    batch.num_held = 0
    assert batch.run(share, 1000) == pytest.approx(0.09, abs=0.015)
    assert batch.num_held < 60


def test_it_follows_a_batch_that_becomes_another() -> None:
    share, batch = CopyShare(target=0.09), Batch(cost=0.56)
    batch.run(share, 400)
    before = share.share
    batch.num_sequences, batch.quiet_s, batch.cost = 256, 0.0155, 1.1
    batch.run(share, 3)
    assert share.share == pytest.approx(before, rel=0.1), "longer steps are not the copies' fault"
    batch.run(share, 400)
    assert batch.run(share, 1000) == pytest.approx(0.09, abs=0.015)


def test_it_stays_within_bounds() -> None:
    for cost, bound in ((50.0, LEAST_SHARE), (0.0, MOST_SHARE)):
        share = CopyShare(target=0.09)
        Batch(cost, noise=0.0).run(share, 2000)
        assert share.share == bound


def test_quiet_steps_leave_it_as_it_is() -> None:
    share = CopyShare(target=0.09)
    before = share.share
    Batch(cost=1.0).run(share, 100, copies=False)
    assert share.share == before and not share.holds


def test_a_step_that_waited_for_something_else_counts_little() -> None:
    share = CopyShare(target=0.09)
    share.step_ended(0.007, 64, is_quiet=True, is_wanted=False)
    before = share.share
    share.step_ended(5.0, 64, is_quiet=False, is_wanted=True)
    assert share.share > 0.9 * before
