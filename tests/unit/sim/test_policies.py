"""Rivals choose what their formulas say."""

import random

from paceline.router.planner import Candidate, Job
from paceline.sim.policies import DynamoCost, LeastLoaded, RoundRobin, Seen, Weighted

_RNG = random.Random(0)
_JOB = Job(1600, 10)


def _seen(name: str, num_queued: int = 0, **known: int) -> Seen:
    return Seen(Candidate(name, False, num_pages=1000)._replace(**known), num_queued)


def test_round_robin_takes_turns() -> None:
    them = [_seen("a"), _seen("b")]
    policy = RoundRobin()
    assert [policy.choose(_JOB, them, _RNG).worker_id for _ in range(4)] == ["a", "b", "a", "b"]


def test_least_loaded_looks_at_sequences_alone() -> None:
    them = [_seen("a", num_running=3, num_cached_tokens=1500), _seen("b", num_running=2)]
    assert LeastLoaded().choose(_JOB, them, _RNG).worker_id == "b"


def test_weights_add_prefix_queue_and_kv() -> None:
    warm = _seen("warm", 5, num_cached_tokens=1600, num_free_pages=500)  # 3 + 0 + 1
    idle = _seen("idle", 0, num_cached_tokens=0, num_free_pages=1000)  # 0 + 2 + 2
    assert Weighted(3.1, 2, 2).choose(_JOB, [warm, idle], _RNG).worker_id == "warm"
    assert Weighted(2.9, 2, 2).choose(_JOB, [warm, idle], _RNG).worker_id == "idle"


def test_dynamo_adds_blocks_to_prefill_and_blocks_in_use() -> None:
    warm = _seen("warm", num_cached_tokens=800, num_free_pages=880)  # 50 x w + 120
    idle = _seen("idle", num_cached_tokens=0, num_free_pages=1000)  # 100 x w + 0
    assert DynamoCost(2.5).choose(_JOB, [warm, idle], _RNG).worker_id == "warm"
    assert DynamoCost(2.3).choose(_JOB, [warm, idle], _RNG).worker_id == "idle"
    drawn = {DynamoCost(2.5, 0.9).choose(_JOB, [warm, idle], _RNG).worker_id for _ in range(50)}
    assert drawn == {"warm", "idle"}
