"""Both ends of a link in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from paceline.kernels.pages import sum_pages
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import (
    Link,
    LocalPool,
    PageIds,
    Reader,
    Source,
    TransportSettings,
)
from paceline.kv_transfer.pull import PinnedPages

SETTINGS = TransportSettings(incarnation="incarnation-1", secret=b"of the deployment")


@dataclass(frozen=True, slots=True)
class Ends:
    source_pool: LocalPool
    pool: LocalPool
    source: Source
    reader: Reader
    link: Link

    def pin(self, source_pages: PageIds, to: PageIds, num_tokens: int | None = None) -> PinnedPages:
        """What the source promises now; generation 7 for all."""
        sums = sum_pages(self.source_pool.memory, source_pages, self.source_pool.group, num_tokens)
        generations = np.full(len(source_pages), 7, np.uint64)
        return PinnedPages(source_pages, to, generations, sums, num_tokens)


@contextmanager
def connected(transport: str, source_pool: LocalPool, pool: LocalPool) -> Iterator[Ends]:
    source = registry.make_source(transport, source_pool, SETTINGS)
    source.start()
    reader = registry.make_reader(transport, pool, SETTINGS)
    link = reader.connect(source.address(), timeout_s=2)
    try:
        yield Ends(source_pool, pool, source, reader, link)
    finally:
        link.close()
        source.close()
