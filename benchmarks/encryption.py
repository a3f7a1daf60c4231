"""What TLS costs a verified pull over tcp, between two processes.

tls_64mib_of_plain, tls_2mib_of_plain   scattered pages of 2 MiB: the speed with TLS over that
                                        without, median of the ratios of pairs

Both processes encrypt and decrypt on a core each. Certificates are made for the run.
"""

import contextlib
import sys
import tempfile
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.common import Figures, Options, publish, show
from benchmarks.source_process import source_process
from benchmarks.transfer import PAIRS, QUICK_PAIRS, TOTALS, compare
from benchmarks.transfer_source import GROUPS, POOL_BYTES, SETTINGS, make_pool, scattered
from benchmarks.verified_pull import verified_pull
from paceline.core.tls import PLAIN, TlsConfig
from paceline.kernels.pages import sum_pages
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import CellSums
from paceline.kv_transfer.pool_memory import new_pool_file, size_pool_memory
from tests.support.certificates import Mount

GROUP = GROUPS[2 << 20]
Exported = tuple[list[bytes], CellSums]  # addresses without and with TLS, sums of all pages


def serve(channel: Connection, tls: TlsConfig) -> None:
    """Exports a pool of random bytes without and with TLS until the channel closes."""
    memory = size_pool_memory(new_pool_file(), POOL_BYTES)
    words = np.frombuffer(memory.view, np.uint64)
    words[:] = np.random.default_rng(0).integers(1 << 63, size=len(words), dtype=np.uint64)
    pool = make_pool(GROUP, memory.view, memory.fd)
    sources = [
        registry.make_source("tcp", pool, replace(SETTINGS, tls=config)) for config in (PLAIN, tls)
    ]
    for source in sources:
        source.start()
    sums = sum_pages(pool.memory, np.arange(pool.num_pages), GROUP)
    channel.send(([source.address() for source in sources], sums))
    with contextlib.suppress(EOFError):
        channel.recv()
    for source in sources:
        source.close()


def measure(options: Options) -> Figures:
    memory = size_pool_memory(new_pool_file(), POOL_BYTES)
    pool = make_pool(GROUP, memory.view, memory.fd)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        tls = Mount(Path(folder) / "tls").config()
        with source_process(serve, tls) as exported:
            addresses, sums = exported
            links = [
                registry.make_reader("tcp", pool, replace(SETTINGS, tls=config)).connect(
                    address, 10
                )
                for config, address in zip((PLAIN, tls), addresses, strict=True)
            ]
            for total, num_bytes in TOTALS.items():
                num_pages = num_bytes // GROUP.page_bytes
                pages = [scattered(GROUP, num_pages, seed=seed) for seed in (1, 2)]
                calls = [verified_pull(link, GROUP, sums, *pages) for link in links]
                num_pairs = QUICK_PAIRS if options.quick else PAIRS
                ratio, plain_s, tls_s = compare(calls[0], calls[1], num_pairs)
                figures[f"tls_{total}_of_plain"] = ratio
                speeds = [num_bytes / taken / 1e9 for taken in (plain_s, tls_s)]
                show(f"{total}: {speeds[0]:.2f} GB/s plain, {speeds[1]:.2f} GB/s with TLS")
    return figures


def main() -> int:
    return publish("encryption", measure)


if __name__ == "__main__":
    sys.exit(main())
