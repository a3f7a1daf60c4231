"""Transport `ucx`: pages travel through UCX, which chooses among the networks of both hosts.

The wheel's UCX has TCP; with a UCX of the system that was built with RDMA the same code uses
InfiniBand or RoCE (docs/transports.md). Hellos, requests and the sign of life go over TCP, so that
only who knows the deployment's secret reaches UCX at all.
"""

from paceline.kv_transfer.base import Pool, TransportSettings, host_pool
from paceline.kv_transfer.tcp import why_unreachable
from paceline.kv_transfer.ucx_reader import UcxReader
from paceline.kv_transfer.ucx_source import UcxSource

__all__ = ["make_reader", "make_source", "why_unreachable"]


def make_source(pool: Pool, settings: TransportSettings) -> UcxSource:
    return UcxSource(host_pool(pool, "ucx"), settings)


def make_reader(pool: Pool, settings: TransportSettings) -> UcxReader:
    return UcxReader(host_pool(pool, "ucx"), settings)
