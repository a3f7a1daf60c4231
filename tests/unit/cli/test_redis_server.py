import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from paceline.cli.child import Child
from paceline.cli.ports import free_port
from paceline.cli.redis_server import RedisServer, embedded_redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = embedded_redis(free_port("127.0.0.1"), tmp_path)
    child = Child("redis", server.command, dict(os.environ), tmp_path / "log", server.probe)
    child.prepare = server.write_config
    assert server.probe() == "starting"
    child.start()
    deadline = time.monotonic() + 10
    while server.probe():
        assert time.monotonic() < deadline, child.tail()
        time.sleep(0.01)
    yield server
    assert child.end(10)


def test_it_serves_scripts_and_streams_to_who_has_the_url(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        assert client.eval("return redis.call('XADD', KEYS[1], '*', 'a', 'b')", 1, "events")
        assert client.xlen("events") == 1


def test_it_refuses_others_on_this_machine(server: RedisServer) -> None:
    url = f"redis://127.0.0.1:{server.port}"
    with redis.Redis.from_url(url) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_its_memory_is_bounded_and_nothing_is_written_to_disk(
    server: RedisServer, tmp_path: Path
) -> None:
    with redis.Redis.from_url(server.url) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(256 << 20)}
        assert client.config_get("save") == {"save": ""}
    assert (tmp_path / "redis.conf").stat().st_mode & 0o777 == 0o600


def test_without_room_for_its_settings_there_are_none_and_no_server(tmp_path: Path) -> None:
    """Else the server would listen everywhere, with no password."""
    server = embedded_redis(free_port("127.0.0.1"), tmp_path)
    child = Child("redis", server.command, dict(os.environ), tmp_path / "log", server.probe)
    child.prepare = server.write_config
    with full_disk(), pytest.raises(OSError):
        child.start()
    assert not child.is_running and not server.config.exists()
    server.write_config()
    with full_disk():  # what is there already needs no room
        server.write_config()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of ours may grow beyond a few bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
