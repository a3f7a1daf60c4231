"""Loads: what is read, and what is refused."""

import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.sim.trace import (
    Arrival,
    parse_mooncake,
    read_mooncake,
    shared_prefix_sessions,
    spread_evenly,
)

ROOT = Path(__file__).resolve().parents[3]
GOOD = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5, 6]}


def test_a_line_is_a_request() -> None:
    (arrival,) = parse_mooncake([json.dumps(GOOD)])
    assert (arrival.at_s, arrival.num_prompt_tokens, arrival.num_output_tokens) == (1.5, 1030, 7)
    assert arrival.blocks == (4, 5, 6) and arrival.num_whole_blocks == 2


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{}",
        "[]",
        json.dumps(GOOD | {"input_length": 0}),
        json.dumps(GOOD | {"output_length": 1 << 40}),
        json.dumps(GOOD | {"hash_ids": 7}),
        json.dumps(GOOD | {"timestamp": -1}),
        json.dumps(GOOD | {"timestamp": "soon"}),
    ],
)
def test_a_line_that_is_none_is_refused_by_its_number(line: str) -> None:
    with pytest.raises(ConfigError, match="trace='line 2': "):
        parse_mooncake([json.dumps(GOOD), line])


def test_packed_and_plain_files_are_read(tmp_path: Path) -> None:
    text = "\n".join([json.dumps(GOOD)] * 3)
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.xz"
    plain.write_text(text)
    packed.write_bytes(lzma.compress(text.encode()))
    assert read_mooncake(plain) == read_mooncake(packed)
    assert len(read_mooncake(packed, 2)) == 2


def test_the_trace_that_ships_is_whole() -> None:
    arrivals = read_mooncake(ROOT / "benchmarks/traces/mooncake_conversation_trace.jsonl.xz")
    assert len(arrivals) == 12_031 and arrivals[-1].at_s == 3536.999


def test_turns_bring_all_that_came_before() -> None:
    arrivals = shared_prefix_sessions(
        3, 4, prefix_tokens=1024, turn_tokens=512, output_tokens=5, pause_s=1.0, seed=1
    )
    assert len(arrivals) == 12 and {a.blocks[:2] for a in arrivals} == {(0, 1)}
    for session in range(3):
        turns = [a.blocks for a in arrivals if a.session == session]
        assert all(
            later[: len(turn)] == turn for turn, later in zip(turns, turns[1:], strict=False)
        )


def test_arrivals_of_one_instant_are_spread_until_the_next_one() -> None:
    times = [0.0, 0.0, 0.0, 3.0, 4.0, 4.0]
    arrivals = [Arrival(at_s, 10 + i, 1, ()) for i, at_s in enumerate(times)]
    spread = spread_evenly(arrivals)
    assert [arrival.at_s for arrival in spread] == [0.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    assert [replace(a, at_s=b.at_s) for a, b in zip(spread, arrivals, strict=True)] == arrivals
