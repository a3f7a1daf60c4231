"""What the level of a worker makes of its engine, and what is said where a device is too small."""

from pathlib import Path

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.worker.config import ComputeSettings, WorkerConfig
from paceline.worker.device_room import room_for
from paceline.worker.levels import LEVELS
from paceline.worker.rank_main import engine_config
from paceline.worker.rank_process import rank_config


@pytest.mark.parametrize(
    ("level", "kernels", "cuda_graphs", "overlap"),
    [
        ("O0", "torch", False, False),
        ("O1", "auto", False, False),
        ("O2", "auto", True, False),
        ("O3", "auto", True, None),
    ],
)
def test_each_level_prepares_more(
    tmp_path: Path, level: str, kernels: str, cuda_graphs: bool, overlap: bool | None
) -> None:
    worker = WorkerConfig(
        model=str(tmp_path), secret="s" * 16, compute=ComputeSettings(level=level)
    )
    config = engine_config(rank_config(worker, -1, "i", ("a", "b", "c")))
    assert LEVELS[level].kernels == kernels
    assert (config.cuda_graphs, config.overlap) == (cuda_graphs, overlap)


def test_the_default_prepares_all() -> None:
    assert ComputeSettings().level == max(LEVELS)


def test_a_want_of_memory_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 << 20, 1 << 30))
    with (
        pytest.raises(ConfigError, match="more than the 5 MiB of cuda:0 that are free") as refused,
        room_for("steps", "pool_mib", 400, "cuda:0", "set pool_mib to 300"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert refused.value.field == "pool_mib" and "set pool_mib to 300" in refused.value.message


def test_other_failures_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="no kernel"), room_for("steps", "a", 1, "cuda:0", ""):
        raise RuntimeError("no kernel image")
