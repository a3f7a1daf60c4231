"""What tenants used, seen by several processes; a SharedUsages stands for each of them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from paceline.core.errors import ConfigError, RateLimited
from paceline.gateway import usage
from paceline.gateway.rate_limits import Meter, TenantLimits
from paceline.gateway.usage import LOCK_S, SharedUsages, new_usage_file

LIMITS = TenantLimits(requests_per_minute=60, tokens_per_minute=600, max_running_requests=3)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = new_usage_file()
    yield fd
    os.close(fd)


def meter(fd: int, column: int, tenant: str = "acme", limits: TenantLimits = LIMITS) -> Meter:
    return Meter(limits, 0.0, SharedUsages(fd, column).of(tenant))


def test_processes_draw_from_the_same_buckets(fd: int) -> None:
    meters = [meter(fd, column) for column in range(4)]
    for i in range(60):
        with meters[i % 4].request(0.0):
            pass
    for one in meters:
        with pytest.raises(RateLimited, match="60 requests a minute"), one.request(0.0):
            pass
    with meters[0].request(1.0):  # which fills evenly
        pass
    with pytest.raises(RateLimited), meters[1].request(1.0):
        pass
    with meter(fd, 1, "other").request(0.0):
        pass


def test_output_in_one_process_is_a_debt_in_the_others(fd: int) -> None:
    first, second = meter(fd, 0), meter(fd, 1)
    first.take_prompt(600, 0.0)
    first.take_output(60, 0.0)
    with pytest.raises(RateLimited) as refused, second.request(0.0):
        pass
    assert refused.value.retry_after_s == pytest.approx(6.1)
    second.take_prompt(600, 66.0)


def test_a_clock_that_is_behind_takes_nothing_back(fd: int) -> None:
    first, second = meter(fd, 0), meter(fd, 1)
    first.take_prompt(600, 60.0)
    with pytest.raises(RateLimited):
        second.take_prompt(1, 59.9)
    first.take_prompt(1, 60.1)


def test_requests_at_once_count_everywhere_and_no_more_when_their_process_is_gone(fd: int) -> None:
    first, second = meter(fd, 0), meter(fd, 1)
    with first.request(0.0), first.request(0.0):
        refused = pytest.raises(RateLimited, match="3 requests")
        with second.request(0.0), refused, second.request(0.0):
            pass
        SharedUsages(fd, 5).forget_running(1)
        with second.request(0.0), pytest.raises(RateLimited), second.request(0.0):
            pass
        SharedUsages(fd, 5).forget_running(0)
        with second.request(0.0), second.request(0.0), second.request(0.0):
            pass


def test_what_was_used_stays_used_in_a_process_that_starts_again(fd: int) -> None:
    meter(fd, 0).take_prompt(600, 0.0)
    with pytest.raises(RateLimited):
        meter(fd, 0).take_prompt(1, 0.0)


def test_there_is_no_place_for_more_tenants_than_slots(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "MAX_TENANTS", 8)
    usages = SharedUsages(fd, 0)
    for i in range(8):
        usages.of(f"tenant-{i}").tokens[0] = i
    assert [SharedUsages(fd, 1).of(f"tenant-{i}").tokens[0] for i in range(8)] == [*range(8)]
    with pytest.raises(ConfigError, match="tenant-8"):
        usages.of("tenant-8")


NUM_TAKES = 20_000
OTHER_PROCESS = f"""
import sys
from paceline.gateway.rate_limits import Meter, TenantLimits
from paceline.gateway.usage import SharedUsages

usage = SharedUsages(int(sys.argv[1]), 1).of("acme")
meter = Meter(TenantLimits(tokens_per_minute=10**9), 0.0, usage)
print("begins", flush=True)
for _ in range({NUM_TAKES}):
    meter.take_output(1, 0.0)
print("has taken", flush=True)
sys.stdin.readline()
with usage.locked():
    print("holds", flush=True)
    sys.stdin.readline()  # for ever
"""


def test_nothing_is_lost_between_processes_and_a_stuck_one_is_not_waited_for(fd: int) -> None:
    """Without the lock two that take at the same time would count once."""
    ours = meter(fd, 0, limits=TenantLimits(tokens_per_minute=10**9))
    command = [sys.executable, "-c", OTHER_PROCESS, str(fd)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, pass_fds=(fd,), stdin=pipe, stdout=pipe) as other:
        assert other.stdin is not None and other.stdout is not None
        try:
            assert other.stdout.readline() == b"begins\n"
            for _ in range(NUM_TAKES):
                ours.take_output(1, 0.0)
            assert other.stdout.readline() == b"has taken\n"
            level = SharedUsages(fd, 0).of("acme").tokens[0]
            assert level == 10**9 - 2 * NUM_TAKES
            other.stdin.write(b"\n")
            other.stdin.flush()
            assert other.stdout.readline() == b"holds\n"
            began_s = time.monotonic()
            for _ in range(100):
                ours.take_output(1, 0.0)
            assert LOCK_S <= time.monotonic() - began_s < 4 * LOCK_S
            assert SharedUsages(fd, 0).of("acme").tokens[0] == level - 100
        finally:
            other.kill()
