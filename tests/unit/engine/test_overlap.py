"""A step is launched while another runs: what it counts on, and what becomes of surprises.

On the CPU a launch computes at once, so these tests see the order of calls, not their times.
"""

from typing import Any

import pytest

from paceline.engine.messages import Cancel, Emission, Submit
from paceline.engine.page_pool import PageState
from tests.unit.engine.benches import EDITED, alone, bench, mock_model, prompt, request
from tests.unit.engine.recorder import recorded, shapes


def test_a_step_is_launched_before_the_tokens_of_the_one_under_way_are_read() -> None:
    b, model = recorded(overlap=True)
    b.handle(Submit(1, request(prompt(10), max_tokens=4)))
    launched = []
    while b.step() is not None:
        launched.append((len(model.batches), len(b.of(Emission))))
    assert launched == [(2, 1), (3, 2), (4, 3), (4, 4)], "an end by length is no surprise"
    assert model.batches[1].token_ids.tolist() == b.tokens(1)[:1]


def test_no_step_is_launched_behind_another_while_the_engine_gives_way() -> None:
    b, model = recorded(overlap=True)
    gives_way = True
    b.engine.gives_way = lambda: gives_way
    b.handle(Submit(1, request(prompt(10), max_tokens=5)))
    launched = []
    while b.step() is not None:
        launched.append((len(model.batches), len(b.of(Emission))))
        gives_way = len(launched) < 3
    assert launched == [(1, 1), (2, 2), (3, 3), (5, 4), (5, 5)]


def test_what_is_computed_beyond_a_stop_token_is_dropped() -> None:
    model = mock_model(eos_every=25)
    spec = request(prompt(20), max_tokens=30)
    b = bench(model, overlap=True).handle(Submit(1, spec), Submit(2, request(prompt(21, 1))))
    b.run().assert_idle()
    assert b.tokens(1) == alone(spec, model)[0]
    assert len(b.tokens(1)) < 30


def test_the_page_of_a_dropped_token_waits_for_its_step() -> None:
    """The second page of this stream was taken for a token beyond its end."""
    model = mock_model(eos_every=16)
    b = bench(model, overlap=True, prefix_cache=False)
    b.handle(Submit(1, request(prompt(10), max_tokens=30)))
    while b.engine.groups.live:
        b.step()
    assert len(b.tokens(1)) == 7
    assert b.engine.pool.counts[PageState.QUARANTINED] == 1
    assert b.engine.has_work()
    b.run().assert_idle()


@pytest.mark.parametrize("sampling", [EDITED, EDITED | {"n": 2, "num_logprobs": 2}])
def test_edits_see_all_tokens_before(sampling: dict[str, Any]) -> None:
    specs = {slot: request(prompt(18 + slot, slot), max_tokens=40, **sampling) for slot in (1, 2)}
    b = bench(overlap=True).handle(*(Submit(slot, spec) for slot, spec in specs.items()))
    b.run().assert_idle()
    for slot, spec in specs.items():
        assert {c: b.tokens(slot, c) for c in spec.choices} == alone(spec)


def test_preemption_waits_for_the_step_under_way() -> None:
    b = bench(num_pages=9, output_window_tokens=0, overlap=True)
    specs = {slot: request(prompt(40, slot), max_tokens=60) for slot in (1, 2, 3)}
    scheduler, under_way = b.engine.scheduler, []
    preempt = scheduler.preempt

    def watched(sequence: Any) -> None:
        under_way.append(b.engine.clock.fence)
        preempt(sequence)

    scheduler.preempt = watched  # type: ignore[method-assign]
    b.handle(*(Submit(slot, spec) for slot, spec in specs.items())).run().assert_idle()
    assert under_way and not any(under_way)
    for slot, spec in specs.items():
        assert b.tokens(slot) == alone(spec)[0]


def test_a_cancelled_stream_ends_while_its_next_token_is_drawn() -> None:
    b = bench(overlap=True)
    b.handle(*(Submit(slot, request(prompt(20, slot), max_tokens=9)) for slot in (1, 2)))
    b.step()
    assert b.engine.groups.live[1].sequences[0].is_promised
    b.handle(Cancel(1)).run().assert_idle()
    assert len(b.tokens(1)) == 1 and len(b.tokens(2)) == 9


def test_a_long_step_is_waited_for_so_that_newcomers_join_the_next() -> None:
    b, model = recorded(overlap=True, max_batch_tokens=40)
    b.engine.scheduler.step_time.observe(100, 0.1)  # 1 ms a token
    b.handle(Submit(1, request(prompt(38), max_tokens=3))).step()
    assert [shapes(batch) for batch in model.batches] == [(0, [38])]
    b.handle(Submit(2, request(prompt(9), max_tokens=3))).step()
    assert shapes(model.batches[1]) == (1, [9])
    assert len(model.batches) == 3, "9 tokens take no 20 ms"
