"""What `paceline up` refuses before it starts anything."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.cli import preflight
from paceline.cli.setup_error import SetupError
from paceline.cli.up import UpConfig
from paceline.core.errors import ConfigError
from tests.support.mock_model import write_mock_model

OWN = frozenset({"pool_mib", "device", "num_threads"})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_mock_model(tmp_path / "mock")


def check(model: Path, environ: Mapping[str, str] | None = None, **settings: Any) -> None:
    preflight.check(UpConfig(model=model, **settings).spec(), environ or {}, OWN)


def rename(model: Path, architecture: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))


def test_what_can_work_passes(model: Path) -> None:
    check(model)
    check(model, {"PACELINE_WORKER_POOL_MIB": "7", "PACELINE_ROUTER_QUEUE_LIMIT": "8"})


def test_pools_are_counted_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 3 << 30)
    check(model, pool_mib=1024, prefill=2, decode=1)
    with pytest.raises(ConfigError) as refused:
        check(model, pool_mib=1024, prefill=2, decode=2)
    assert refused.value.message == (
        "pool_mib=1024: page pools and weights of 4 workers need 4096 MiB, 3072 MiB are available"
    )
    with pytest.raises(ConfigError, match="pool_mib=2048: "):
        check(model, {"PACELINE_WORKER_POOL_MIB": "2048"})


def test_memory_of_tiers_counts(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 3 << 30)
    listed = tmp_path / "tiers.yaml"
    environ = {"PACELINE_WORKER_TIERS": str(listed)}
    file = f"- {{kind: file, path: {tmp_path}, capacity_mib: 100000}}\n"
    listed.write_text("- {kind: host, capacity_mib: 256}\n" + file)
    check(model, environ, pool_mib=1024, prefill=1, decode=1)
    listed.write_text("- {kind: host, capacity_mib: 513}\n" + file)
    with pytest.raises(ConfigError, match="tiers and weights of 2 workers need 3074 MiB, 3072"):
        check(model, environ, pool_mib=1024, prefill=1, decode=1)
    listed.write_text("- {kind: hosts}")
    with pytest.raises(SetupError, match=r"tiers\[0\]\.kind='hosts'"):
        check(model, environ)


@pytest.mark.parametrize(
    ("environ", "weights_mib"),
    [
        ({}, 8),
        ({"PACELINE_WORKER_DTYPE": "bfloat16"}, 4),
        ({"PACELINE_WORKER_QUANTIZATION": "int8"}, 2),
    ],
)
def test_weights_count_for_each_worker_as_it_holds_them(
    model: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], weights_mib: int
) -> None:
    rename(model, "LlamaForCausalLM")
    save_file({"w": torch.zeros(1 << 21, dtype=torch.bfloat16)}, model / "model.safetensors")
    monkeypatch.setattr(preflight, "available_bytes", lambda: 2 * (512 + weights_mib) << 20)
    check(model, environ)
    monkeypatch.setattr(preflight, "available_bytes", lambda: (2 * (512 + weights_mib) << 20) - 1)
    with pytest.raises(ConfigError, match=f"of 2 workers need {2 * (512 + weights_mib)} MiB"):
        check(model, environ)


def test_a_model_that_cannot_be_served_is_refused(model: Path) -> None:
    rename(model, "LlamaForCausalLM")
    with pytest.raises(ConfigError, match=r"'model.safetensors': file is missing"):
        check(model)
    (model / "model.safetensors").write_bytes(b"\x03\0\0\0\0\0\0\0{]}")
    with pytest.raises(ConfigError, match=r"'model.safetensors': cannot be read"):
        check(model)
    rename(model, "LammaForCausalLM")
    with pytest.raises(ConfigError, match="unknown architecture; known: GPT2LM") as refused:
        check(model)
    assert "Mock" not in refused.value.message


def test_a_setting_from_the_environment_is_explained_where_it_belongs(model: Path) -> None:
    with pytest.raises(SetupError) as refused:
        check(model, {"PACELINE_WORKER_DTYPE": "int3"})
    assert refused.value.message == (
        "dtype='int3': must be one of auto, float32, bfloat16, float16"
        " (see `paceline prefill --help`)"
    )
    with pytest.raises(SetupError, match="queue_limit=0: .*see `paceline router --help`"):
        check(model, {"PACELINE_ROUTER_QUEUE_LIMIT": "0"})
    with pytest.raises(ConfigError, match="num_threads=-1: must not be negative"):
        check(model, num_threads=-1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_there_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="device='cuda': torch finds no CUDA device"):
        check(model, device="cuda")
    with pytest.raises(ConfigError, match="device='tpu': must be cpu, cuda or cuda:INDEX"):
        check(model, device="tpu")
