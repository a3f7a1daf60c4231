"""What a prompt that waits costs at each step, and that it never waits longer for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.allocator import Allocator
from paceline.engine.allowances import Pages
from paceline.engine.messages import Submit
from paceline.engine.page_pool import PageState
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.sequence import Sequence
from tests.unit.engine import mixes, window_mixes
from tests.unit.engine.benches import Bench, alone, bench, mock_model, prompt, request
from tests.unit.engine.windows import WINDOWS, windowed_model

may_fit = Allocator._may_fit


def checked(self: Allocator, sequence: Sequence, keys: list[bytes], allowance: Pages) -> bool:
    """Against the walk that it spares."""
    answer = may_fit(self, sequence, keys, allowance)
    if not answer:
        packed = sequence.tokens[: len(keys) * PAGE_TOKENS].tobytes()
        _, hits = self.cache.match(keys, packed)
        shared = sum(
            self.pool.pages[page].state is not PageState.CACHED
            for group, pages in zip(self.groups, hits, strict=True)
            if not group.window
            for page in pages
        )
        assert sum(allowance) - shared > self.pool.num_available
    return answer


CHECKED = mock.patch.object(Allocator, "_may_fit", checked)
quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(
    config=mixes.engines,
    mix=st.lists(mixes.requests, min_size=3, max_size=7),
)
def test_what_is_refused_unseen_would_not_fit(
    config: dict[str, int], mix: list[tuple[int, ...]]
) -> None:
    with CHECKED:
        mixes.play(bench(mixes.MODEL, **config), mix)


@quick
@given(
    kind=st.sampled_from(sorted(WINDOWS)),
    config=window_mixes.engines,
    mix=st.lists(window_mixes.requests, min_size=3, max_size=6),
    pins=window_mixes.pins,
)
def test_nor_would_it_with_windows(
    kind: str,
    config: dict[str, int],
    mix: window_mixes.Mix,
    pins: list[tuple[int, int]],
) -> None:
    num_pages = window_mixes.smallest_pool(kind, config)
    b = bench(windowed_model(kind), num_pages, max_pinned_share=1.0, **config)
    with CHECKED:
        window_mixes.Play(b, mix, pins).run()


@contextmanager
def looks() -> Iterator[list[int]]:
    """Numbers of the blocks that were looked for by name."""
    found: list[int] = []
    find = PrefixCache._find

    def counted(self: PrefixCache, group: int, block: int, *rest: object) -> int | None:
        found.append(block)
        return find(self, group, block, *rest)  # type: ignore[arg-type]

    with mock.patch.object(PrefixCache, "_find", counted):
        yield found


MODEL = mock_model(max_position_embeddings=1024, eos_every=10**6)


def new_bench(num_pages: int) -> Bench:
    return bench(MODEL, num_pages, max_batch_tokens=1024, output_window_tokens=256)


def test_a_long_prompt_that_waits_is_looked_up_once() -> None:
    b = new_bench(64)
    b.handle(Submit(1, request(prompt(600), max_tokens=200))).step()
    ask = request(prompt(560) + prompt(300, 3), max_tokens=4)  # 35 of its 54 pages are in use
    with looks() as found:
        b.handle(Submit(2, ask))
        for _ in range(100):
            b.step()
    assert not b.tokens(2) and 35 <= len(found) < 100
    b.run()
    assert b.tokens(2) == alone(ask, MODEL)[0]
    b.assert_idle()


def test_a_prompt_is_looked_up_again_when_its_next_block_is_named() -> None:
    first = request(prompt(300), max_tokens=256)
    output = alone(first, MODEL)[0]
    b = new_bench(80).handle(Submit(1, first), Submit(2, request(prompt(300, 3), max_tokens=256)))
    b.step()
    b.handle(Submit(3, request([*prompt(300), *output[:200], 9], max_tokens=4)))
    for _ in range(30):
        b.step()
    assert not b.tokens(3)
    while not b.tokens(3):
        b.step()
    assert len(b.tokens(1)) < 150, "it shares what request 1 has computed meanwhile"
    b.run().assert_idle()


def test_a_prompt_is_let_in_when_its_cached_pages_have_come_into_use() -> None:
    b = new_bench(45).handle(Submit(1, request([*prompt(320), 9], max_tokens=1))).run()
    b.handle(Submit(2, request(prompt(150, 3), max_tokens=10))).step()
    b.handle(Submit(3, request(prompt(320) + prompt(310, 4), max_tokens=10, priority=1))).step()
    b.handle(Submit(4, request([*prompt(320), 9], max_tokens=60))).step()
    assert b.engine.scheduler.waiting.first() is b.engine.groups.live[3].leader
    while not b.tokens(3):
        b.step()
    assert 5 < len(b.tokens(4)) < 30, "it fits once request 2 has ended"
    b.run().assert_idle()
