"""The worker's settings: checked, and clear about what is wrong."""

from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import made, parse
from paceline.core.errors import ConfigError
from paceline.kv_transfer import registry
from paceline.worker.config import LinkSettings, WorkerConfig
from tests.support.certificates import Mount


def test_a_missing_secret_says_which_variable_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PACELINE_WORKER_SECRET"):
        WorkerConfig(model=str(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "/no/such/folder"),
        ("port", 70_000),
        ("probe_port", -1),
        ("pool_mib", 0),
        ("dtype", "int4"),
        ("quantization", "int3"),
        ("level", "O4"),
        ("beat_s", 1.5),  # routers take it for dead
        ("silence_s", 1.5),  # less than two beats
        ("silence_s", 0.0),
        ("max_pinned_share", 1.5),
        ("transports", ()),
        ("transports", ("udp",)),
        ("transports", ("auto", "cuda_ipc")),  # the pool is in host memory
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("drain_timeout_s", -1.0),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(tmp_path: Path, field: str, value: object) -> None:
    settings = {"model": str(tmp_path), "secret": "s" * 16, field: value}
    with pytest.raises(ConfigError, match=field):
        made(WorkerConfig, settings)


def test_settings_come_from_arguments_and_environment(tmp_path: Path) -> None:
    environment = {"PACELINE_WORKER_SECRET": "s" * 16, "PACELINE_WORKER_POOL_MIB": "7"}
    arguments = ["--model", str(tmp_path / ""), "--transports", "shm,tcp"]
    config = parse(WorkerConfig, arguments, environment, "decode")
    assert (config.compute.pool_mib, config.links.transports) == (7, ("shm", "tcp"))
    assert config.served_name == tmp_path.name


def test_the_folder_that_we_are_in_has_a_name_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert WorkerConfig(model=".", secret="s" * 16).served_name == tmp_path.name


def test_transports_fit_where_the_pool_is(tmp_path: Path) -> None:
    on_device = {"model": str(tmp_path), "secret": "s" * 16, "device": "cuda"}
    made(WorkerConfig, {**on_device, "transports": ("cuda_ipc", "auto")})
    with pytest.raises(ConfigError, match="'tcp': needs a pool in host memory"):
        made(WorkerConfig, {**on_device, "transports": ("cuda_ipc", "tcp")})


def test_a_fabric_outside_of_tls_is_refused_where_encryption_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "problem_of", lambda name, on_device=None: "")
    mount = Mount(tmp_path / "tls")
    required = mount.config(encryption="required")
    settings: dict[str, Any] = {"model": str(tmp_path), "secret": "s" * 16}
    for name in ("nixl", "ucx"):
        with pytest.raises(ConfigError, match="set tls_fabric_encrypted") as caught:
            WorkerConfig(links=LinkSettings(("tcp", name)), tls=required, **settings)
        assert caught.value.field == "transports"
        WorkerConfig(links=LinkSettings((name,)), tls=mount.config(), **settings)
    WorkerConfig(links=LinkSettings(("auto",)), tls=required, **settings)
