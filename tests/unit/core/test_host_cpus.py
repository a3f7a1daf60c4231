"""Cores by affinity and by the quotas of cgroups, in small copies of /proc and /sys."""

import os
from pathlib import Path

import pytest

from paceline.core.host_cpus import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, value in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(value + "\n")
    return root


def test_without_a_quota_it_is_what_we_may_run_on(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8
    limits = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}
    assert usable_cores(write(tmp_path, limits)) == 8


@pytest.mark.parametrize(("quota", "cores"), [("200000", 2), ("150000", 2), ("1000", 1)])
def test_the_tightest_quota_above_us_counts(tmp_path: Path, quota: str, cores: int) -> None:
    limits = {
        "proc/self/cgroup": "0::/pods/one",
        "sys/fs/cgroup/pods/one/cpu.max": "600000 100000",
        "sys/fs/cgroup/pods/cpu.max": f"{quota} 100000",
    }
    assert usable_cores(write(tmp_path, limits)) == cores


def test_version_1_is_read_too(tmp_path: Path) -> None:
    limits = {
        "proc/self/cgroup": "4:cpuacct,cpu:/docker/abc",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert usable_cores(write(tmp_path, limits)) == 3
    unlimited = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}
    assert usable_cores(write(tmp_path, unlimited)) == 8
