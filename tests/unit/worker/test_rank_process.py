"""A rank that cannot start: its last words reach the front as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.cli.roles import python_path
from paceline.core.errors import ConfigError, EngineFailure
from paceline.worker import rank_process
from paceline.worker.config import WorkerConfig
from paceline.worker.rank_process import launch
from tests.support.mock_model import write_mock_model


async def refusal(model: Path, run_dir: Path, device: str = "cpu") -> ConfigError:
    config = WorkerConfig(model=str(model), secret="s" * 16, run_dir=str(run_dir), device=device)
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
    monkeypatch.setattr(rank_process, "find_spec", lambda name: None)
    config = WorkerConfig(model=str(write_mock_model(tmp_path)), secret="s" * 16)
    with pytest.raises(EngineFailure, match=r"pip install 'paceline\[engine\]'"):
        await launch(config)


def test_a_rank_whose_front_has_ended_ends_before_it_loads_anything() -> None:
    command = [sys.executable, "-X", "importtime", "-P", "-m", "paceline.worker.rank_start", "1"]
    variables = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(command, env=variables, capture_output=True, timeout=20)
    assert done.returncode == 1 and b"rank_main" not in done.stderr and b"torch" not in done.stderr
