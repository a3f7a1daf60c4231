"""Both ends of a link in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from paceline.kv_transfer import registry
from paceline.kv_transfer.base import (
    Link,
    PageIds,
    Pool,
    Reader,
    Source,
    TransportSettings,
)
from paceline.kv_transfer.pull import PinnedPages
from tests.contract.pools import ACROSS, sums_of

CUDA_IPC = pytest.param(
    "cuda_ipc",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
CUDA_IPC_ACROSS = pytest.param(
    ACROSS,
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    ],
)

SETTINGS = TransportSettings(incarnation="incarnation-1", secret=b"of the deployment")


@dataclass(frozen=True, slots=True)
class Ends:
    source_pool: Pool
    pool: Pool
    source: Source
    reader: Reader
    link: Link

    def pin(self, source_pages: PageIds, to: PageIds, num_tokens: int | None = None) -> PinnedPages:
        """What the source promises now; generation 7 for all."""
        sums = sums_of(self.source_pool, source_pages, num_tokens)
        generations = np.full(len(source_pages), 7, np.uint64)
        return PinnedPages(source_pages, to, generations, sums, num_tokens)


@contextmanager
def connected(
    transport: str, source_pool: Pool, pool: Pool, settings: TransportSettings = SETTINGS
) -> Iterator[Ends]:
    source = registry.make_source(transport, source_pool, settings)
    source.start()
    reader = registry.make_reader(transport, pool, settings)
    link = reader.connect(source.address(), timeout_s=2)
    try:
        yield Ends(source_pool, pool, source, reader, link)
    finally:
        link.close()
        reader.close()
        source.close()
