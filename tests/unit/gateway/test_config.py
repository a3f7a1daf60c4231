"""A gateway's settings are checked before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import made, parse
from paceline.core.errors import ConfigError
from paceline.gateway.config import GatewayConfig
from paceline.gateway.main import GatewayServer
from tests.support.gateway_deployment import gateway_config


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"secret": ""}, "PACELINE_GATEWAY_SECRET"),
        ({"secret": "s" * 15}, "at least 16 bytes"),
        ({"model": Path("/nowhere")}, "model"),
        ({"port": 70_000}, "port"),
        ({"grpc_port": -1}, "grpc_port"),
        ({"probe_port": 65536}, "probe_port"),
        ({"processes": 0}, "processes"),
        ({"processes": 65}, "processes"),
        ({"stall_s": 2.0}, "stall_s"),
        ({"router": ()}, "router"),
        ({"router": ("nohost",)}, "host:port"),
        ({"router_silence_s": 0.5}, "router_silence_s"),
        ({"request_timeout_s": 0.0}, "request_timeout_s"),
        ({"max_body_bytes": -1}, "max_body_bytes"),
    ],
)
def test_a_wrong_setting_names_itself(model_dir: Path, fields: dict[str, Any], name: str) -> None:
    settings = {"model": model_dir, "secret": "s" * 16, **fields}
    with pytest.raises(ConfigError, match=name):
        made(GatewayConfig, settings)


def test_it_reads_arguments_and_environment(model_dir: Path) -> None:
    environ = {"PACELINE_GATEWAY_SECRET": "s" * 16, "PACELINE_GATEWAY_PORT": "1"}
    argv = ["--model", str(model_dir), "--router", "a:1,b:2"]
    config = parse(GatewayConfig, argv, environ, "gateway")
    assert (config.links.router, config.port, config.host) == (("a:1", "b:2"), 1, "127.0.0.1")


async def test_a_taken_port_names_itself(model_dir: Path) -> None:
    first = GatewayServer(gateway_config(model_dir, "127.0.0.1:1"))
    await first.start()
    for field, port in (("port", first.port), ("grpc_port", first.grpc_port)):
        with pytest.raises(ConfigError, match=f"{field}={port}"):
            GatewayServer(gateway_config(model_dir, "127.0.0.1:1", **{field: port}))
    await first.drain()
    await first.stop()
