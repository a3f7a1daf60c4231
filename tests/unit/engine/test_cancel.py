"""A slot can be ended in every state, and then nothing of it is left."""

import pytest

from paceline.engine.messages import Cancel, Ended, Release, Reserve, Submit, TransferClosed
from paceline.engine.page_pool import PageState
from tests.unit.engine.benches import Bench, alone, bench, prompt, request


def waiting(b: Bench) -> None:
    b.handle(Submit(9, request(prompt(150), max_tokens=1)), Submit(1, request(prompt(50))))
    b.step()


def in_the_middle_of_its_prompt(b: Bench) -> None:
    b.handle(Submit(1, request(prompt(150), n=2)))
    b.step()


def decoding(b: Bench) -> None:
    b.handle(Submit(1, request(prompt(20), n=2, temperature=1.0)))
    for _ in range(3):
        b.step()


def held(b: Bench) -> None:
    b.handle(Submit(1, request(prompt(20), n=2), prefill_only=True)).run()


def reserved(b: Bench) -> None:
    b.handle(Reserve(1, request(prompt(20), n=2))).run()


def planned_but_not_launched(b: Bench) -> None:
    b.handle(Submit(2, request(prompt(40), max_tokens=1))).run()
    b.handle(Submit(1, request(prompt(40)), prefill_only=True))
    b.step()
    assert b.engine._planned is not None


STATES = [waiting, in_the_middle_of_its_prompt, decoding, held, reserved, planned_but_not_launched]


@pytest.mark.parametrize("state", STATES)
def test_cancel_in_every_state_frees_everything(state: object) -> None:
    b = bench(num_pages=12, max_running=2)
    state(b)  # type: ignore[operator]
    b.handle(Cancel(1), Cancel(1), TransferClosed(1)).run()
    assert len(b.of(Ended, 1)) == 1
    b.assert_idle()
    spec = request(prompt(50, 3))
    b.handle(Submit(5, spec)).run()
    assert b.tokens(5) == alone(spec)[0]


@pytest.mark.parametrize("state", [in_the_middle_of_its_prompt, decoding, held, reserved])
def test_choices_are_cancelled_one_by_one(state: object) -> None:
    b = bench(num_pages=12)
    state(b)  # type: ignore[operator]
    b.handle(Cancel(1, choices=(0,)))
    assert 1 in b.engine.groups.live
    b.handle(Cancel(1, choices=(0,)), Cancel(1, choices=(1,))).run()
    assert len(b.of(Ended, 1)) == 1
    is_filling = state is reserved  # its front may be copying, whoever cancels what
    assert b.engine.pool.counts[PageState.QUARANTINED] == (2 if is_filling else 0)
    b.handle(TransferClosed(1)).run()
    b.assert_idle()


def test_a_cancelled_choice_leaves_the_other_alone() -> None:
    spec = request(prompt(150), n=2, temperature=1.0, seed=5)
    b = bench().handle(Submit(1, spec))
    b.step()
    b.handle(Cancel(1, choices=(0,))).run()
    assert b.tokens(1, 0) == []
    assert b.tokens(1, 1) == alone(spec)[1]
    b.assert_idle()


@pytest.mark.parametrize("preempt", [True, False])
def test_vllm_ascend_14180_results_of_a_step_that_no_longer_counts_are_dropped(
    preempt: bool,
) -> None:
    """https://github.com/vllm-project/vllm-ascend/pull/14180"""
    spec, other = request(prompt(40), max_tokens=20), request(prompt(20, 1), max_tokens=20)
    b = bench().handle(Submit(1, spec), Submit(2, other))
    for _ in range(4):
        b.step()
        flight = b.engine.launch()
        assert flight is not None
        if preempt:
            b.engine.scheduler.preempt(b.engine.groups.live[1].sequences[0])
        else:
            b.handle(Cancel(1))
        num_before = len(b.tokens(1))
        b.finish_step(flight)
        b.step()
        assert len(b.tokens(1)) == num_before
    b.run()
    assert b.tokens(2) == alone(other)[0]
    if preempt:
        assert b.tokens(1) == alone(spec)[0]
    b.assert_idle()


def test_pages_freed_under_a_step_wait_for_it() -> None:
    b = bench().handle(Submit(1, request(prompt(20))))
    b.step()
    flight = b.engine.launch()
    assert flight is not None
    b.handle(Cancel(1))
    assert b.engine.pool.counts[4] == 1  # the partial page: quarantined
    b.finish_step(flight)
    b.run().assert_idle()


def test_release_of_a_prompt_that_still_runs_ends_it() -> None:
    b = bench().handle(Submit(1, request(prompt(150)), prefill_only=True))
    b.step()
    b.handle(Release(1)).run()
    assert len(b.of(Ended, 1)) == 1
    b.assert_idle()
