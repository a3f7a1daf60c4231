"""Any mix of requests on a model with windows gives each the tokens of a model that keeps all."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from paceline.engine.messages import (
    Ended,
)
from tests.unit.engine.benches import bench, prompt
from tests.unit.engine.window_mixes import Mix, Play, engines, pins, requests, smallest_pool
from tests.unit.engine.windows import WINDOWS, expected_tokens, windowed_model


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(sorted(WINDOWS)),
    spare=st.integers(0, 3),
    config=engines,
    mix=st.lists(requests, min_size=1, max_size=6),
    pins=pins,
)
def test_any_mix_gives_each_stream_the_tokens_of_a_model_that_keeps_all(
    kind: str, spare: int, config: dict[str, int], mix: Mix, pins: list[tuple[int, int]]
) -> None:
    model = windowed_model(kind)
    num_pages = smallest_pool(kind, config) + spare
    b = bench(model, num_pages, max_pinned_share=1.0, **config)
    Play(b, mix, pins).run()
    for slot, one in enumerate(mix):
        if not one["is_reserved"]:
            tokens = tuple(prompt(one["num_tokens"], one["salt"]))
            expected = expected_tokens(kind, tokens, one["max_tokens"])
            for choice in range(one["n"]):
                got = b.tokens(slot, choice)
                assert got == (expected if one["cancel"] is None else expected[: len(got)])
        assert len(b.of(Ended, slot)) == 1
    b.assert_idle()
