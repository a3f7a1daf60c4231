"""Who gets which tokens of a step."""

import time
from typing import Any

import pytest

from paceline.core.errors import ConfigError, ErrorCode
from paceline.engine.config import EngineConfig
from paceline.engine.messages import Ended, Submit
from paceline.engine.step_time import StepTime
from tests.unit.engine.benches import alone, bench, mock_model, prompt, request
from tests.unit.engine.recorder import recorded, shapes


def test_a_long_prompt_does_not_starve_decodes() -> None:
    b, model = recorded(max_batch_tokens=24)
    b.handle(Submit(1, request(prompt(10), max_tokens=30)))
    b.step()
    b.handle(Submit(2, request(prompt(200, 1), max_tokens=2)))
    for _ in range(8):
        b.step()
    assert len(b.tokens(1)) == 9, "one token every step"
    assert [shapes(batch) for batch in model.batches[1:4]] == [(1, [16]), (1, [16]), (1, [16])]


def test_chunks_share_a_step_with_decodes_within_the_budget() -> None:
    b, model = recorded(max_batch_tokens=40, max_running=6)
    b.handle(*(Submit(slot, request(prompt(30, slot), max_tokens=20)) for slot in range(6))).run()
    for batch in model.batches:
        assert len(batch.token_ids) <= 40
    assert shapes(model.batches[0]) == (0, [30, 10])
    assert shapes(model.batches[1]) == (1, [20, 16, 3])
    assert all(len(b.tokens(slot)) == 20 for slot in range(6))


def test_priority_then_arrival() -> None:
    b = bench(max_running=1)
    for slot, priority in ((1, 5), (2, 5), (3, 0), (4, 5)):
        b.handle(Submit(slot, request(prompt(10, slot), priority=priority)))
    b.run()
    assert [e.slot for e in b.of(Ended)] == [3, 1, 2, 4]


def test_preemption_takes_the_least_important_then_the_latest() -> None:
    b = bench(num_pages=12, output_window_tokens=0)
    preempted: list[int] = []
    scheduler = b.engine.scheduler
    preempt = scheduler.preempt
    scheduler.preempt = lambda s: (preempted.append(s.group.slot), preempt(s))  # type: ignore
    specs = {
        slot: request(prompt(40, slot), max_tokens=60, priority=priority)
        for slot, priority in ((1, 1), (2, 2), (3, 1))
    }
    b.handle(*(Submit(slot, spec) for slot, spec in specs.items())).run()
    assert preempted[0] == 2 and 3 in preempted and 1 not in preempted
    for slot, spec in specs.items():
        assert b.tokens(slot) == alone(spec)[0]


def test_sglang_5984_nan_logits_fail_that_request_only() -> None:
    """https://github.com/sgl-project/sglang/issues/5984"""
    b, model = recorded()
    model.spoil_position = 30
    spec = request(prompt(20), max_tokens=8)
    b.handle(Submit(1, spec), Submit(2, request(prompt(29, 1), n=2, temperature=1.0))).run()
    assert b.failure(2).code is ErrorCode.INTERNAL
    assert "not finite" in b.failure(2).message
    assert len(b.of(Ended, 2)) == 1
    assert b.tokens(1) == alone(spec)[0]
    b.assert_idle()


def test_step_time_limits_chunks_by_what_was_measured() -> None:
    time = StepTime(max_step_s=0.1)
    assert time.max_chunk_tokens(decodes=True) == 64  # nothing is known yet
    time.observe(100, 0.1)
    assert time.max_chunk_tokens(decodes=True) == pytest.approx(100, abs=1)
    time.observe(5, 9.0)  # too small to tell
    assert time.max_chunk_tokens(decodes=True) == pytest.approx(100, abs=1)
    assert time.max_chunk_tokens(decodes=False) == pytest.approx(200, abs=1)
    for _ in range(30):
        time.observe(100, 0.2)
    assert 50 <= time.max_chunk_tokens(decodes=True) <= 52
    time.observe(100, 50.0)
    assert time.max_chunk_tokens(decodes=False) == 32


@pytest.mark.parametrize(("decodes", "least"), [(True, 4), (False, 2)])
def test_chunks_shrink_to_the_time_of_a_step(decodes: bool, least: int) -> None:
    model = mock_model(token_s=0.001)
    b = bench(model, max_batch_tokens=200, step_time_ms=50)
    b.handle(Submit(1, request(prompt(120), max_tokens=1))).run()
    if decodes:
        b.handle(Submit(2, request(prompt(8, 2), max_tokens=500)))
        b.step()
    b.handle(Submit(3, request(prompt(200, 1), max_tokens=1)))
    num_steps = 0
    while not b.of(Ended, 3):
        b.step()
        num_steps += 1
    assert num_steps >= least


@pytest.mark.parametrize(
    ("target_ms", "hoped_ms", "most"),
    [(40.0, 0.0, 40), (0.0, 40.0, 40), (200.0, 40.0, 40), (40.0, 200.0, 40), (0.0, 0.0, 200)],
)
def test_chunks_beside_a_stream_leave_it_its_latency(
    target_ms: float, hoped_ms: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that knows nothing but what the model takes."""
    now_s = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", lambda wait_s: now_s.append(now_s.pop() + wait_s))
    model = mock_model(token_s=0.001, max_position_embeddings=1024)
    b = bench(model, 256, max_batch_tokens=200, step_time_ms=10000, itl_target_ms=target_ms)
    b.handle(Submit(1, request(prompt(8), max_tokens=900, itl_ms=hoped_ms)))
    b.step()
    chunks: list[int] = []
    schedule_chunks = b.engine.scheduler._running_chunks

    def recorded_chunks(budget: Any) -> Any:
        found = schedule_chunks(budget)
        chunks.extend(entry.num_new for entry in found)
        return found

    b.engine.scheduler._running_chunks = recorded_chunks  # type: ignore[method-assign]
    for slot in (2, 3):
        b.handle(Submit(slot, request(prompt(700, slot), max_tokens=1)))
        while not b.of(Ended, slot):
            b.step()
    assert sum(chunks) > 900, "prompts advance"
    assert max(chunks[4:]) <= most and (most < 200 or max(chunks) > 100)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_batch_tokens", 8),
        ("max_running", 0),
        ("output_window_tokens", -1),
        ("max_pinned_share", 0.0),
        ("step_time_ms", float("nan")),
        ("itl_target_ms", -1.0),
    ],
)
def test_settings_that_cannot_work_are_refused(field: str, value: float) -> None:
    settings = {"max_running": 8, field: value}
    with pytest.raises(ConfigError, match=f"^{field}={value}"):
        EngineConfig(**settings)  # type: ignore[arg-type]
