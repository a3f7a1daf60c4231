"""A rank that cannot start: its last words reach the front as they are."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from paceline.cli.roles import python_path
from paceline.core.errors import ConfigError, EngineFailure
from paceline.worker import rank_program
from paceline.worker.config import ComputeSettings, WorkerConfig
from paceline.worker.rank_process import launch
from paceline.worker.rank_program import started_ahead
from tests.support.mock_model import write_mock_model


async def refusal(model: Path, run_dir: Path, device: str = "cpu") -> ConfigError:
    compute = ComputeSettings(device)
    config = WorkerConfig(model=str(model), secret="s" * 16, run_dir=str(run_dir), compute=compute)
    with pytest.raises(ConfigError) as refused:
        await launch(config)
    return refused.value


async def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    model = write_mock_model(tmp_path / "mock", architectures=["Strange"])
    error = await refusal(model, tmp_path)
    assert error.message.startswith("architectures='Strange': unknown architecture; known: GPT2")
    assert error.field == "architectures"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
async def test_a_device_that_is_not_there_is_no_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    error = await refusal(write_mock_model(tmp_path / "mock"), tmp_path, "cuda")
    assert error.message.startswith("device='cuda': torch finds no CUDA device on this machine")
    assert "Traceback" not in capfd.readouterr().err


async def test_what_a_worker_needs_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_program, "find_spec", lambda name: None)
    config = WorkerConfig(model=str(write_mock_model(tmp_path)), secret="s" * 16)
    with pytest.raises(EngineFailure, match=r"pip install 'paceline\[engine\]'"):
        await launch(config)


async def test_a_rank_that_was_started_ahead_is_the_one_that_serves(tmp_path: Path) -> None:
    model = str(write_mock_model(tmp_path / "mock"))
    compute = ComputeSettings(pool_mib=8)
    config = WorkerConfig(model=model, secret="s" * 16, run_dir=str(tmp_path), compute=compute)
    with started_ahead() as program:
        rank = await launch(config, program)
        assert psutil.Process().children() == [psutil.Process(program.pid)]
        assert rank.ready.num_pages > 0
        await rank.stop()
        await rank.close()
        assert program.returncode == -signal.SIGKILL


async def test_nothing_is_left_of_a_rank_that_was_started_ahead_in_vain(tmp_path: Path) -> None:
    descriptors = os.listdir("/proc/self/fd")
    with started_ahead() as program:
        rank = psutil.Process(program.pid)
        assert is_alive(rank)
    assert not rank.is_running()
    assert os.listdir("/proc/self/fd") == descriptors


def test_a_rank_that_still_loads_ends_with_its_front(tmp_path: Path) -> None:
    model = write_mock_model(tmp_path / "mock")
    code = (
        "import asyncio; from paceline.worker.config import ComputeSettings, WorkerConfig; "
        "from paceline.worker.rank_process import launch; "
        f"asyncio.run(launch(WorkerConfig(model={str(model)!r}, secret='s' * 16)))"
    )
    variables = {**os.environ, "PYTHONPATH": python_path(), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-P", "-c", code], env=variables) as front:
        deadline = time.monotonic() + 20
        while not (ranks := psutil.Process(front.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)  # it loads for seconds
        front.kill()
    time.sleep(0.5)
    assert not any(is_alive(rank) for rank in ranks)


def is_alive(process: psutil.Process) -> bool:
    """Not also one that waits for its exit code to be read."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
