"""Sockets that listen, or keep a port for others that will."""

import socket

from paceline.core.errors import ConfigError


def bind(host: str, port: int, *, is_shared: bool = False, field: str = "port") -> socket.socket:
    """`is_shared`: others of the same user may have the port, too, if theirs are shared as well.
    Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(field, port, f"cannot listen on {host}: {error.strerror}") from error
    return bound


def reserve(host: str, port: int, field: str) -> socket.socket:
    """Keeps a port for processes of ours that share it, also while none of them lives. It does not
    listen, so no connection comes to it. Raises ConfigError."""
    bind(host, port, field=field).close()  # who shares it already would not be in our way
    return bind(host, port, is_shared=True, field=field)
