"""What cuda_ipc counts on: memory of a dead process stays mapped, and is freed with its mapping."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline.kv_transfer.cuda_memory import map_device_memory, new_device_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_BYTES = 1 << 30
DEVICE = torch.device("cuda")
OWNER = """
import socket, sys, torch
from paceline.kv_transfer.cuda_memory import new_device_memory
memory = new_device_memory(int(sys.argv[2]), torch.device("cuda"))
memory.bytes.view(torch.int32)[:] = torch.arange(memory.bytes.nbytes // 4, device="cuda")
torch.cuda.synchronize()
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
socket.send_fds(connection, [b"x"], [memory.fd])
connection.recv(1)
"""


def test_memory_is_zeroed_and_freed_with_its_last_tensor() -> None:
    before = free_bytes()
    memory = new_device_memory(NUM_BYTES, DEVICE)
    assert not memory.bytes.any()
    part = memory.bytes[:16].view(torch.int64)
    memory.close()
    del memory
    assert before - free_bytes() > NUM_BYTES / 2, "a view of it is left"
    del part
    assert before - free_bytes() < NUM_BYTES / 2


def free_bytes() -> int:
    """Without what torch's own allocator keeps."""
    torch.zeros(1, device=DEVICE)  # the context takes memory, too
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(DEVICE)[0]


def test_a_mapping_sees_what_the_owner_writes() -> None:
    memory = new_device_memory(4096, DEVICE)
    mapped = map_device_memory(memory.fd, memory.bytes.nbytes, DEVICE)
    memory.bytes[:100] = 7
    assert mapped[:101].tolist() == [7] * 100 + [0]
    memory.close()


def test_memory_of_an_owner_that_is_killed_during_a_copy_stays_readable(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        arguments = [sys.executable, "-P", "-c", OWNER, str(tmp_path / "socket"), str(NUM_BYTES)]
        owner = subprocess.Popen(arguments)
        listener.settimeout(60)
        connection, _ = listener.accept()
        _, (fd,), _, _ = socket.recv_fds(connection, 1, 1)
    mapped = map_device_memory(fd, NUM_BYTES, DEVICE)
    os.close(fd)
    copy, done = torch.empty_like(mapped), torch.cuda.Event()
    for _ in range(400):  # about 200 ms
        copy.copy_(mapped, non_blocking=True)
    done.record()
    time.sleep(0.02)
    was_copying = not done.query()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    connection.close()
    torch.cuda.synchronize()
    expected = torch.arange(NUM_BYTES // 4, device="cuda", dtype=torch.int32)
    assert was_copying
    assert torch.equal(copy.view(torch.int32), expected)
    assert torch.equal(mapped.view(torch.int32), expected)
