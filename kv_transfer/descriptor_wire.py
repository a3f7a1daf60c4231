"""What source and reader say to each other on one host: one message, with the pool's descriptor."""

import msgspec

from paceline.kv_transfer.geometry import Geometry

VERSION = 2
MAX_HELLO_BYTES = 1024


class DescriptorAddress(msgspec.Struct, frozen=True, array_like=True):
    host: str
    socket_name: str  # abstract: starts with a zero byte
    incarnation: str


class DescriptorHello(msgspec.Struct, frozen=True, array_like=True):
    version: int
    incarnation: str
    geometry: Geometry
    num_bytes: int  # of the memory; its pages come first
