"""Replays: deterministic, complete, and in line with what the profile says."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.router.placement import Placer
from paceline.sim.cluster import Load, Setup, replay
from paceline.sim.floor import idle_ttfts
from paceline.sim.goodput import good_share
from paceline.sim.policies import (
    DynamoCost,
    Formula,
    LeastLoaded,
    RoundRobin,
    Weighted,
    by_formula,
)
from paceline.sim.profile import H200_LLAMA_8B
from paceline.sim.trace import BLOCK_TOKENS, Arrival, shared_prefix_sessions

SMALL = replace(H200_LLAMA_8B, num_pages=4096)
FORMULAS = [RoundRobin(), LeastLoaded(), Weighted(), DynamoCost(), DynamoCost(8, 0.1)]


def _sessions(num_sessions: int, seed: int, pause_s: float = 0.3) -> Load:
    return Load(
        shared_prefix_sessions(
            num_sessions,
            5,
            prefix_tokens=1024,
            turn_tokens=1024,
            output_tokens=30,
            pause_s=pause_s,
            seed=seed,
        )
    )


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([None, *FORMULAS]),
)
def test_every_request_ends_once_and_all_is_given_back(
    seed: int, num_prefill: int, num_decode: int, num_routers: int, formula: Formula | None
) -> None:
    setup = Setup(SMALL, num_prefill, num_decode, num_routers=num_routers, seed=seed)
    make_placer = Placer if formula is None else by_formula(formula)
    done = replay(setup, _sessions(6, seed), make_placer)
    assert not done.gave_up
    for outcome in done.outcomes:
        assert 0 < outcome.ttft_s < outcome.total_s < float("inf")
        assert 0 <= outcome.num_cached < outcome.arrival.num_prompt_tokens
        assert outcome.reader.startswith("d")


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_the_same_seed_gives_the_same_outcomes(num_prefill: int) -> None:
    load = _sessions(8, 3)
    setup = Setup(SMALL, num_prefill, 3, seed=5)
    first = replay(setup, load, Placer)
    assert first == replay(setup, load, Placer)
    assert first == replay(setup, _sessions(8, 3), Placer)
    assert first != replay(replace(setup, seed=6), load, Placer)


def test_several_routers_know_what_each_other_s_requests_left_behind() -> None:
    load = _sessions(24, 3)
    setup = Setup(SMALL, 0, 3, seed=5)
    cached = [
        sum(o.num_cached for o in replay(replace(setup, num_routers=n), load, Placer).outcomes)
        for n in (1, 3)
    ]
    assert cached[1] > 0.9 * cached[0]


def test_a_prompt_alone_takes_what_is_the_floor_of_all() -> None:
    load = _sessions(6, 3, pause_s=30.0)
    done = replay(Setup(H200_LLAMA_8B, 0, 1, noise=0), load, Placer)
    floor = idle_ttfts(H200_LLAMA_8B, load.arrivals)
    late = [o.ttft_s / least for o, least in zip(done.outcomes, floor, strict=True)]
    assert sorted(late)[len(late) // 2] == pytest.approx(1)
    assert min(late) >= 1 - 1e-9


def test_a_request_alone_takes_what_the_profile_says() -> None:
    load = Load([Arrival(0.0, 4096, 101, tuple(range(8)))])
    (whole,) = replay(Setup(H200_LLAMA_8B, 0, 1, noise=0), load, Placer).outcomes
    assert whole.ttft_s == pytest.approx(H200_LLAMA_8B.prompt_s(4096))
    itl = H200_LLAMA_8B.decode_step_s(1, 4096 + 51)
    assert whole.mean_itl_s == pytest.approx(itl, rel=0.001)
    (split,) = replay(Setup(H200_LLAMA_8B, 1, 1, noise=0), load, Placer).outcomes
    assert (split.worker, split.reader) == ("p0", "d0")
    assert split.ttft_s == pytest.approx(whole.ttft_s)
    pull_s = H200_LLAMA_8B.pull_launch_s + 4096 * H200_LLAMA_8B.pull_s
    assert split.total_s - whole.total_s == pytest.approx(pull_s, rel=0.01)


def test_a_prompt_beside_decodes_slows_them_down() -> None:
    runs = []
    for prompts in (0, 5):
        arrivals = [Arrival(0.0, 512, 400, (0,))]
        arrivals += [
            Arrival(0.2 * i, 8192, 2, tuple(range(100 * i, 100 * i + 16)))
            for i in range(1, prompts + 1)
        ]
        runs.append(replay(Setup(H200_LLAMA_8B, 0, 1, noise=0), Load(arrivals), Placer))
    alone, beside = (run.outcomes[0].mean_itl_s for run in runs)
    assert beside > 1.3 * alone


def _long_beside_short(seed: int) -> Load:
    """Prompts of 60 thousand tokens among others, and outputs that are soon over."""
    chance, now, block, arrivals = random.Random(seed), 0.0, 0, []
    for _ in range(300):
        now += chance.expovariate(7)
        num_tokens = 60_000 if chance.random() < 0.06 else chance.randrange(500, 8000)
        blocks = tuple(range(block, block + num_tokens // BLOCK_TOKENS))
        block += len(blocks)
        arrivals.append(Arrival(now, num_tokens, chance.randrange(4, 300), blocks))
    return Load(arrivals)


def test_who_says_what_is_hoped_for_gets_it_more_often() -> None:
    missed = Counter[bool]()
    for seed in range(3):
        load = _long_beside_short(seed)
        for tells_slo in (False, True):
            setup = Setup(H200_LLAMA_8B, 0, 4, seed=seed, tells_slo=tells_slo)
            done = replay(setup, load, Placer)
            missed[tells_slo] += round(300 * (1 - good_share(done.outcomes, setup.slo)))
    assert missed[True] <= 0.75 * missed[False], missed


def test_a_replay_that_fails_ends_early() -> None:
    load = _sessions(40, 1, pause_s=0.01)
    setup = Setup(SMALL, 0, 1, gives_up=True)
    assert replay(setup, load, Placer).gave_up
    assert not replay(replace(setup, gives_up=False), load, Placer).gave_up
