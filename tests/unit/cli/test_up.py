import json
import shlex
import socket
from pathlib import Path

import pytest

from paceline.cli.ports import free_port
from paceline.cli.up import UpConfig, curl, run
from paceline.core.errors import ConfigError
from tests.support.mock_model import write_mock_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_mock_model(tmp_path / "mock")


def test_a_taken_port_is_said_before_anything_starts(model: Path, run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = UpConfig(model=model, port=taken.getsockname()[1], run_dir=str(run_dir))
        with pytest.raises(ConfigError, match="address already in use; choose with --port"):
            run(config)
    assert not list(run_dir.iterdir())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": Path()}, "`paceline demo-model` makes one"),
        ({"model": Path("/nonexistent")}, "there is no such folder; nothing is downloaded"),
        ({"decode": 0}, "decode=0: must lie between 1 and 64"),
        ({"prefill": -1}, "prefill=-1: must lie between 0 and 64"),
        ({"routers": 0}, "routers=0: must lie between 1 and 8"),
        ({"port": 65536}, "port=65536: must lie"),
        ({"port": 8000, "grpc_port": 8000}, "grpc_port=8000: must differ from port"),
        ({"secret": "short"}, "secret='…': set PACELINE_UP_SECRET to .* at least 16 bytes"),
        ({"run_dir": "/nonexistent"}, "run_dir='/nonexistent': must be a folder"),
        ({"ready_timeout_s": float("nan")}, "ready_timeout_s=nan: must be positive"),
    ],
)
def test_wrong_settings_are_named(model: Path, wrong: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {"model": model, **wrong}
    with pytest.raises(ConfigError, match=message):
        UpConfig(**settings)  # type: ignore[arg-type]


def test_a_run_folder_too_deep_for_sockets_is_named(model: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 63)
    deep.mkdir()
    with pytest.raises(ConfigError, match=r"its path is \d+ bytes too long for the sockets"):
        UpConfig(model=model, run_dir=str(deep))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_that_is_no_model_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    with pytest.raises(ConfigError, match=f"there is no {name} in this folder"):
        UpConfig(model=model)


def test_settings_reach_the_workers_only_when_given(model: Path) -> None:
    spec = UpConfig(model=model, transport="tcp", num_threads=1).spec()
    assert spec.settings["decode"] == {"transports": "tcp", "num_threads": 1}


def test_as_many_routers_as_asked_for(model: Path) -> None:
    assert UpConfig(model=model).spec().routers == 1
    assert UpConfig(model=model, routers=3).spec().routers == 3


def test_the_shown_curl_is_a_valid_request(model: Path) -> None:
    words = shlex.split(curl("http://127.0.0.1:8000", model))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[-1])
    assert body["model"] == "mock"
    assert body["messages"][0]["role"] == "user"


def test_a_model_without_chat_template_gets_a_completion(model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    words = shlex.split(curl("http://127.0.0.1:8000", model))
    assert words[1].endswith("/v1/completions")
    assert "prompt" in json.loads(words[-1])


def test_the_grpc_port_follows_the_http_port_and_evades_one_that_is_taken(model: Path) -> None:
    port = free_port("127.0.0.1")
    assert UpConfig(model=model).grpc_port == 0
    assert UpConfig(model=model, port=port).spec().grpc_port == port + 1
    assert UpConfig(model=model, port=port, grpc_port=9).spec().grpc_port == 9
    assert UpConfig(model=model, port=0).spec().grpc_port == 0
    assert UpConfig(model=model, port=65535).spec().grpc_port == 0
    with socket.create_server(("127.0.0.1", port + 1)):
        assert UpConfig(model=model, port=port).spec().grpc_port == 0
