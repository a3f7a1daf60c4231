"""Transport `nixl`: one-sided reads of a registered pool by NVIDIA's NIXL, whose wheel has RDMA.

The source's processor takes no part in a read. Between hosts it needs RDMA at both ends; within a
host processes read each other's memory. Where NIXL would fall back to messages over TCP it is
refused: those are slow, and can abort the source (`nixl_reader.MIN_BYTES_PER_SECOND`).
"""

from paceline.kv_transfer.base import Pool, TransportSettings, host_pool
from paceline.kv_transfer.nixl_reader import NixlReader
from paceline.kv_transfer.nixl_source import NixlSource
from paceline.kv_transfer.tcp import why_unreachable

__all__ = ["make_reader", "make_source", "why_unreachable"]


def make_source(pool: Pool, settings: TransportSettings) -> NixlSource:
    return NixlSource(host_pool(pool, "nixl"), settings)


def make_reader(pool: Pool, settings: TransportSettings) -> NixlReader:
    return NixlReader(host_pool(pool, "nixl"), settings)
