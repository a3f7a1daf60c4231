"""What shm's source and reader say to each other: one message, with the pool's descriptor."""

import msgspec

from paceline.kv_transfer.geometry import Geometry

VERSION = 1
MAX_HELLO_BYTES = 1024


class ShmAddress(msgspec.Struct, frozen=True, array_like=True):
    host: str
    socket_name: str  # abstract: starts with a zero byte
    incarnation: str


class ShmHello(msgspec.Struct, frozen=True, array_like=True):
    version: int
    incarnation: str
    geometry: Geometry
