"""Mixes of requests on a small engine, drawn by hypothesis, and what plays them."""

from typing import Any

import hypothesis.strategies as st

from paceline.engine.messages import Cancel, Submit
from tests.unit.engine.benches import EDITED, Bench, mock_model, prompt, request

MODEL = mock_model(eos_every=90)
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 2.0, "top_p": 0.8, "seed": 2, "n": 2},
    EDITED,
    EDITED | {"n": 2, "num_prompt_logprobs": 2},
]

requests = st.tuples(
    st.integers(1, 70),  # prompt tokens
    st.integers(0, 1),  # which prompt
    st.integers(1, 40),  # max_tokens
    st.integers(0, len(KINDS) - 1),
    st.integers(0, 2),  # priority
    st.integers(0, 12),  # arrives after so many steps
    st.one_of(st.none(), st.integers(1, 30)),  # is cancelled after so many steps
)
engines = st.fixed_dictionaries(
    {
        "num_pages": st.integers(8, 14),
        "max_batch_tokens": st.integers(5, 60),
        "max_running": st.integers(1, 4),
        "output_window_tokens": st.sampled_from([0, 16, 256]),
        "prefix_cache": st.booleans(),
        "overlap": st.booleans(),
    }
)


def play(b: Bench, mix: list[tuple[int, ...]]) -> None:
    for step in range(60):
        for slot, (num_tokens, salt, max_tokens, kind, priority, arrival, cancel) in enumerate(mix):
            if step == arrival:
                spec = request(
                    prompt(num_tokens, salt),
                    max_tokens=max_tokens,
                    priority=priority,
                    **KINDS[kind],
                )
                b.handle(Submit(slot, spec))
            if cancel is not None and step == arrival + cancel:
                b.handle(Cancel(slot))
        b.step()
        assert b.engine.pool.check_integrity() == ""
    b.run()
