import fcntl
import mmap
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from paceline.core.errors import ConfigError
from paceline.core.host_memory import available_bytes
from paceline.kv_transfer import pool_memory

NUM_BYTES = 1 << 20
NEW_POOL = (
    "from paceline.kv_transfer.pool_memory import new_pool_file, size_pool_memory\n"
    "new_pool = lambda num_bytes: size_pool_memory(new_pool_file(), num_bytes)\n"
)


def new_pool(num_bytes: int = NUM_BYTES) -> pool_memory.PoolMemory:
    return pool_memory.size_pool_memory(pool_memory.new_pool_file(), num_bytes)


def test_a_pool_starts_zeroed_and_is_shared_between_its_writers() -> None:
    memory = new_pool()
    other = pool_memory.open_pool_memory(os.dup(memory.fd))
    assert not np.frombuffer(memory.view, np.uint8).any()
    memory.view[5] = 7
    other.view[6] = 8
    assert bytes(other.view[5:7]) == bytes(memory.view[5:7]) == b"\x07\x08"
    memory.close()
    other.close()
    assert memory.view[5] == 7  # the mapping outlives the descriptor


def test_its_size_is_fixed_from_the_start() -> None:
    memory = new_pool()
    assert pool_memory.has_fixed_size(memory.fd)
    for size in (0, 2 * NUM_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    memory.close()


def test_sealed_it_can_only_be_read_by_newcomers() -> None:
    memory = new_pool()
    pool_memory.seal_pool_memory(memory.fd)
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, NUM_BYTES)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    reader = pool_memory.map_read_only(memory.fd)
    memory.view[0] = 3  # its writers go on
    assert reader[0] == 3
    with pytest.raises(TypeError, match="read-only"):
        reader[0] = 4
    memory.close()


def test_a_file_that_can_shrink_is_told_apart() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    read_end, write_end = os.pipe()
    assert not pool_memory.has_fixed_size(fd)
    assert not pool_memory.has_fixed_size(read_end)
    for opened in (fd, read_end, write_end):
        os.close(opened)


def test_memory_that_cannot_be_had_is_said_plainly() -> None:
    program = (
        "import resource\n"
        "from paceline.core.errors import ConfigError\n"
        f"{NEW_POOL}resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "try:\n    new_pool(4 << 30)\n"
        "except ConfigError as error:\n    print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pool_mib=4096: memory for the page pool cannot be had" in done.stdout


def test_more_than_is_available_is_refused_before_any_of_it_is_touched() -> None:
    """The kernel would grant it, and kill somebody once it is filled."""
    available = available_bytes()
    assert available is not None
    with pytest.raises(ConfigError, match=r"cannot be had: \d+ MiB are available") as refused:
        new_pool(available + (1 << 30))
    assert refused.value.field == "pool_mib"
    left = available_bytes()
    assert left is not None
    assert left > available // 2


@pytest.mark.parametrize("num_mib", [0, -1, 1 << 42])
def test_an_impossible_size_is_refused(num_mib: int) -> None:
    with pytest.raises(ConfigError, match=f"pool_mib={num_mib}"):
        new_pool(num_mib << 20)


def test_nothing_is_left_after_a_kill() -> None:
    before = set(os.listdir("/dev/shm"))
    program = (
        f"import sys\n{NEW_POOL}"
        "memory = new_pool(1 << 20)\nprint('ready', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    assert set(os.listdir("/dev/shm")) <= before
