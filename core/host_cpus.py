"""How many cores this process may keep busy.

More threads than that only wait for each other: a quota of two cores on a machine with 64 stops
all of 64 threads for most of each period.
"""

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

from paceline.core import cgroups


def usable_cores(root: Path = Path("/")) -> int:
    """Those it may run on, or what the tightest cgroup's quota amounts to, rounded up."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    for version, folder in cgroups.folders("cpu", root):
        if version == 2:
            words = cgroups.read(folder / "cpu.max").split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [cgroups.read(folder / name).strip() for name in names]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            yield ceil(int(words[0]) / int(words[1]))
