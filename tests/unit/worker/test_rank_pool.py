"""A rank's pool on a device, where the driver has no memory or cannot export it."""

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from paceline.core.errors import ConfigError
from paceline.kv_transfer.cuda_driver import OUT_OF_MEMORY, DriverError
from paceline.models.loader import load_model
from paceline.worker import rank_pool
from tests.support.mock_model import write_mock_model

DEVICE = "meta"  # takes no memory and needs no driver
POOL_BYTES = 1 << 20


def with_driver(monkeypatch: pytest.MonkeyPatch, code: int, free: int) -> None:
    def fail(num_bytes: int, device: torch.device) -> None:
        raise DriverError("cuMemCreate", code, "out of order")

    monkeypatch.setattr(rank_pool, "new_device_memory", fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 30))


@pytest.mark.parametrize(("code", "free"), [(OUT_OF_MEMORY, 3 << 20), (801, 1000)])
def test_a_pool_that_does_not_fit_is_a_wrong_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, free: int
) -> None:
    model = load_model(write_mock_model(tmp_path)).model
    with_driver(monkeypatch, code, free)
    with pytest.raises(ConfigError, match=f"{free >> 20} MiB of {DEVICE} are free") as refused:
        rank_pool.make_pool(model, -1, POOL_BYTES, DEVICE)
    assert refused.value.field == "pool_mib"
    fitting = (free >> 20) - (free >> 20) // 8
    assert f"set it to {fitting} at most" in refused.value.message


def test_memory_that_cannot_be_exported_is_torchs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(write_mock_model(tmp_path)).model
    with_driver(monkeypatch, 801, 1 << 30)
    with capture_logs() as logs:
        pool = rank_pool.make_pool(model, -1, POOL_BYTES, DEVICE)
    assert logs[0]["event"] == "the page pool cannot be exported"
    assert "cuMemCreate: out of order" in logs[0]["reason"]
    page = model.layout.page
    assert pool.tensors[0].shape == (POOL_BYTES // page.page_bytes, *page.shape)
    assert pool.device_fd == -1
