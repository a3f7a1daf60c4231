"""What strangers send to ports that are not theirs."""

import pickle
import random
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import psutil


class Marker:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.path), "w"))


def junk(marker: Path) -> list[bytes]:
    """A pickle, random bytes, a length of 2 GB."""
    return [
        pickle.dumps(Marker(marker)) + b"\0" * 64,
        random.Random(1).randbytes(4096),
        (2 << 30).to_bytes(4, "big") + (2 << 30).to_bytes(8, "little") + bytes(64),
    ]


def listening_ports(pids: Iterable[int]) -> set[int]:
    return {
        connection.laddr.port
        for pid in pids
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def seconds_until_closed(port: int, message: bytes) -> float:
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        try:
            connection.sendall(message)
            while connection.recv(4096):
                pass
        except ConnectionError:
            pass
    return time.monotonic() - started
