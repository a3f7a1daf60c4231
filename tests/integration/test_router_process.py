"""The router as a process: starts fast without torch, drains on SIGTERM, names a taken port."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from paceline.core.errors import ConfigError
from paceline.router.config import RouterConfig
from paceline.router.service import Router

_MAIN = """
import sys
from paceline.core.config import parse
from paceline.router.config import RouterConfig
from paceline.router.main import run
import os
config = parse(RouterConfig, sys.argv[1:], os.environ, "router")
assert not {"torch", "transformers", "paceline.engine", "paceline.worker"} & set(sys.modules)
sys.exit(run(config))
"""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_without_torch_and_leaves_with_0_on_a_signal(number: int) -> None:
    probe_port = _free_port()
    arguments = [f"--probe-port={probe_port}", "--port=0", "--redis-url=redis://127.0.0.1:1"]
    environment = {**os.environ, "PACELINE_ROUTER_SECRET": "s" * 16}
    command = [sys.executable, "-c", _MAIN, *arguments]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        _wait_for_live(probe_port)
        process.send_signal(number)
        _, errors = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert '"service": "router"' in errors and "Traceback" not in errors


async def test_a_taken_port_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        router = Router(RouterConfig(port=port, probe_port=0, secret="s" * 16))
        with pytest.raises(ConfigError, match=f"port={port}: cannot be bound"):
            await router.start()
        await router.stop()


def _wait_for_live(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the router did not come up")


def test_a_part_that_breaks_ends_the_process_with_1() -> None:
    broken = _MAIN.replace(
        "config = parse",
        "from paceline.router.redis_follower import RedisFollower\n"
        "async def discover(self): raise KeyError('a bug')\n"
        "RedisFollower.discover = discover\n"
        "config = parse",
    )
    arguments = ["--probe-port=0", "--port=0", "--redis-url=redis://127.0.0.1:1"]
    environment = {**os.environ, "PACELINE_ROUTER_SECRET": "s" * 16}
    command = [sys.executable, "-c", broken, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "KeyError" in done.stderr
