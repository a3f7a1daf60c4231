"""What /proc and cgroups of both versions say, in small copies of them."""

from pathlib import Path

import pytest

from paceline.core.host_memory import available_bytes

MIB = 1 << 20
MEMINFO = f"MemTotal: {8 << 20} kB\nMemAvailable: {4 << 20} kB\nHugePages_Total: 0\n"


def write(root: Path, files: dict[str, object]) -> None:
    for name, value in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{value}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/"})
    return tmp_path


def test_without_a_limit_it_is_what_the_machine_has(root: Path) -> None:
    assert available_bytes(root) == 4 << 30
    write(root, {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": 5})
    assert available_bytes(root) == 4 << 30


def test_the_tightest_cgroup_above_us_counts_and_old_cache_is_free(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/pods/one",
            "sys/fs/cgroup/pods/memory.max": 900 * MIB,
            "sys/fs/cgroup/pods/memory.current": 700 * MIB,
            "sys/fs/cgroup/pods/memory.stat": f"anon 5\ninactive_file {100 * MIB}",
            "sys/fs/cgroup/pods/one/memory.max": 800 * MIB,
            "sys/fs/cgroup/pods/one/memory.current": 100 * MIB,
        },
    )
    assert available_bytes(root) == 300 * MIB


def test_version_1_is_read_where_a_container_sees_only_its_own_folder(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "5:cpu:/\n4:memory,hugetlb:/docker/abc\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 512 * MIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 500 * MIB,
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {8 * MIB}",
        },
    )
    assert available_bytes(root) == 20 * MIB
    write(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": 0x7FFFFFFFFFFFF000})
    assert available_bytes(root) == 4 << 30


def test_more_in_use_than_allowed_leaves_nothing(root: Path) -> None:
    write(root, {"sys/fs/cgroup/memory.max": MIB, "sys/fs/cgroup/memory.current": 2 * MIB})
    assert available_bytes(root) == 0


def test_where_nothing_is_said_nothing_is_known(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_this_machine_has_some() -> None:
    available = available_bytes()
    assert available is not None
    assert available > 0
