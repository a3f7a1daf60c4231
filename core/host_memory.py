"""How much memory this process can still get before the kernel kills it.

Linux grants more than there is and kills whoever touches too much. What is available is the least
of MemAvailable and of what each cgroup above us leaves: its limit less what it uses and cannot
drop. Both versions of cgroups are read.
"""

from collections.abc import Iterator
from pathlib import Path

from paceline.core import cgroups

_NAMES = {  # by version: the limit, what is used, and what of it is cache
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_NO_LIMIT = 1 << 60  # version 1 writes "none" as a number near 2^63


def available_bytes(root: Path = Path("/")) -> int | None:
    """None where the kernel does not say. `root`: of /proc and /sys."""
    found = [*_cgroup_rooms(root)]
    if (available := _read_table(root / "proc/meminfo", ":").get("MemAvailable")) is not None:
        found.append(available << 10)
    return min(found, default=None)


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """What each limited cgroup above this process leaves."""
    for version, folder in cgroups.folders("memory", root):
        room = _room(folder, *_NAMES[version])
        if room is not None:
            yield room


def _room(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Cached files that nobody used lately count as free: the kernel drops them first."""
    limit, usage = (
        cgroups.read(folder / limit_name).strip(),
        cgroups.read(folder / usage_name).strip(),
    )
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= _NO_LIMIT:
        return None
    cached = _read_table(folder / "memory.stat", " ").get(cache_name, 0)
    return max(0, int(limit) - int(usage) + cached)


def _read_table(path: Path, separator: str) -> dict[str, int]:
    """Lines of a name, `separator` and a number."""
    rows = (line.partition(separator) for line in cgroups.read(path).splitlines())
    words = {name: rest.split() for name, _, rest in rows}
    return {name: int(rest[0]) for name, rest in words.items() if rest and rest[0].isdigit()}
