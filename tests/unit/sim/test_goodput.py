"""Figures of a replay, the search for goodput, and the table of `paceline sim`."""

import json
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.router.placement import Placer
from paceline.sim.cluster import Load, Setup
from paceline.sim.goodput import MOST, goodput, meets, weighted_percentiles
from paceline.sim.main import SimConfig, rows, run
from paceline.sim.profile import H200_LLAMA_8B
from paceline.sim.slo import Slo
from paceline.sim.trace import Arrival


def test_goodput_lies_between_what_meets_the_slo_and_what_does_not() -> None:
    """Prompts of 0.19 s, one a second: a worker takes about five times that pace."""
    load = Load([Arrival(float(i), 7168, 2, tuple(range(99 * i, 99 * i + 14))) for i in range(40)])
    setup = Setup(H200_LLAMA_8B, 0, 1)
    found = goodput(setup, load, Placer, guess=1.0)
    assert 4 < found < 9
    assert meets(setup, load, Placer, found) and not meets(setup, load, Placer, found * 1.03)


def test_the_search_ends_where_nothing_or_everything_meets_the_slo() -> None:
    load = Load([Arrival(0.1 * i, 2048, 1, (4 * i, 4 * i + 1)) for i in range(3)])
    assert goodput(Setup(H200_LLAMA_8B, 0, 1), load, Placer) == MOST
    impossible = Setup(H200_LLAMA_8B, 0, 1, slo=Slo(ttft_s=0.0, ttft_token_s=0.0))
    assert goodput(impossible, load, Placer) == 0.0


def test_what_is_promised_counts_both_times() -> None:
    arrival, slo = Arrival(0.0, 1000, 11, (0,)), Slo()
    assert slo.ttft_limit_s(arrival) == pytest.approx(1.1)
    assert slo.is_met(arrival, 1.0, 1.39) and not slo.is_met(arrival, 1.0, 1.41)
    assert not slo.is_met(arrival, 1.2, 1.3) and not slo.is_met(arrival, 1.0, float("inf"))


def test_percentiles_weigh_steps_by_their_tokens() -> None:
    assert weighted_percentiles([(1.0, 98), (5.0, 2)], (50, 99)) == [1.0, 5.0]


@pytest.fixture
def two_fleets(tmp_path: Path) -> SimConfig:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 250 * i, "input_length": 6000, "output_length": 40, "hash_ids": [i, i]}
        for i in range(30)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    return SimConfig(trace=str(trace), workers=2, prefill="0,1")


def test_the_table_has_a_row_a_fleet_and_is_deterministic(two_fleets: SimConfig) -> None:
    table = rows(two_fleets)
    assert [row.fleet for row in table] == ["2 aggregated", "1P1D"]
    assert all(row.goodput > 1 and 0 < row.summary.ttft_p50_s < 3 for row in table)
    assert table == rows(two_fleets)


def test_the_table_fits_eighty_columns(
    two_fleets: SimConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(two_fleets) == 0
    head, aggregated, split, _, _ = [line.strip() for line in capsys.readouterr().out.split("\n")]
    assert head.startswith("workers") and head.endswith("hit rate")
    assert aggregated.startswith("2 aggregated ") and split.startswith("1P1D ")


@pytest.mark.parametrize(
    "wrong",
    [{"trace": "/none"}, {"prefill": "2"}, {"prefill": "x"}, {"noise": 1.0}, {"share": 0.0}],
)
def test_settings_are_checked(wrong: dict[str, str], tmp_path: Path) -> None:
    trace = tmp_path / "t"
    trace.touch()
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SimConfig(**({"trace": str(trace), "workers": 2, "prefill": "0"} | wrong))  # type: ignore[arg-type]
