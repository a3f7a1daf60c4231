"""Ports on this machine."""

import random
import socket

from paceline.core.errors import ConfigError

# Below the range that Linux takes for outgoing connections: nobody grabs it before our child does.
FIRST, LAST = 20_000, 32_000
ATTEMPTS = 200

_given: set[int] = set()


def free_port(host: str) -> int:
    """A port that nobody listens on."""
    return free_ports(host, 1)[0]


def free_ports(host: str, count: int) -> range:
    """So many in a row. Never given twice by this process."""
    for _ in range(ATTEMPTS):
        first = random.randint(FIRST, LAST - count)
        ports = range(first, first + count)
        if _given.isdisjoint(ports) and not any(listen_error(host, port) for port in ports):
            _given.update(ports)
            return ports
    raise ConfigError("host", host, f"no free port found between {FIRST} and {LAST}")


def check_free(field: str, host: str, port: int) -> None:
    """Raises ConfigError when nobody could listen there."""
    if error := listen_error(host, port):
        flag = "--" + field.replace("_", "-")
        raise ConfigError(field, port, f"cannot listen on {host}: {error}; choose with {flag}")


def listen_error(host: str, port: int) -> str:
    """Why nobody can listen there; empty if one can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""
